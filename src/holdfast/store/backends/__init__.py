"""The places of checkpoints, behind ``interfaces``: a directory, a bucket, or memory with injected faults."""
