"""What people read: the console of a run, views made from its files, fault reports, logs, completion, error output."""
