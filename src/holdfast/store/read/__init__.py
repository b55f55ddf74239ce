"""Loading of checkpoints.

- ``validation``: judges whether a directory is a complete checkpoint.
- ``load_plan``: chooses the extents (pieces of files) to read.
- ``load``: reads and verifies the extents, and copies them to the caller's buffers.
"""
