"""The start of a job from a command line: its flags, the checks before the first worker, and the launcher."""
