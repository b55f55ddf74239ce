"""The management of many checkpoints in one root (a directory or URL).

- ``checkpoint_root``: find, list and remove checkpoints.
- ``lineage``: the checkpoints of one run and its predecessors.
- ``retention``: the times of saves, and the checkpoints to keep.
- ``repair``: restore damaged files.
- ``checkpoint_tools``: list holders, merge into one file.
"""
