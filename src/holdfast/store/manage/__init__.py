"""The management of many checkpoints in one root (a directory or URL).

- ``checkpoint_root``: find, list and remove checkpoints.
- ``lineage``: the checkpoints of one run and of the runs that it continues.
- ``retention``: the times of saves, and the checkpoints to keep.
- ``repair``: restore damaged files.
- ``checkpoint_tools``: list the holders of boxes, merge a checkpoint into one file.
"""
