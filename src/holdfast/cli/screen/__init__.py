"""The output for people: the console of a run, views of its files, fault reports, logs, shell completion, errors."""
