"""The output for people: console of a run, views made from a run's files, fault reports, logs, completion, errors."""
