"""Support for schedulers: the description of a job in their environment, and scripts and manifests that start a job."""
