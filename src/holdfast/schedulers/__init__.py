"""Schedulers: the description of a job in their environment, and the scripts and manifests that start one."""
