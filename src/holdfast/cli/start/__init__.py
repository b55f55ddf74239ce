"""From a command line to a running job: flags, their files and schedulers, the checks before the first worker, and
the launcher, which is the front process of a run.
"""
