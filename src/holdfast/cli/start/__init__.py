"""The start of a job from a command line: flags from words, files and schedulers, checks before the first worker, and
the launcher.
"""
