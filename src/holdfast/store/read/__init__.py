"""Loading.

- ``validation``: judges whether a directory is a complete checkpoint.
- ``load_plan``: chooses the extents (pieces of files) to read.
- ``load``: reads and verifies them.
"""
