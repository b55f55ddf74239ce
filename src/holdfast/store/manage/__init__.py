"""Many checkpoints in one place.

- ``checkpoint_root``: find, list and remove them.
- ``lineage``: which belong to one run and its predecessors.
- ``retention``: when to save and which to keep.
- ``repair``: restore damaged files.
- ``checkpoint_tools``: list holders, merge into one file.
"""
