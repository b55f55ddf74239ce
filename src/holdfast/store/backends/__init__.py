"""Where checkpoints are: a directory, a bucket, or memory with faults on request, behind ``interfaces``."""
