"""Support for schedulers: a job's description read from their environment, and scripts and manifests for them."""
