"""The kinds of store for checkpoints: a directory, an S3 bucket, or memory with injected faults for tests."""
