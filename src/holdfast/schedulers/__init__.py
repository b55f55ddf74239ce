"""Schedulers: what they tell a run by its environment, and the scripts and manifests that start one."""
