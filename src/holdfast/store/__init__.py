"""Checkpoints: each rank writes its share alone, and a load verifies all bytes before the caller uses them.

- ``layouts``: the boxes of tensors that each rank holds, and the parts that it writes.
- ``format``: the files of a checkpoint.
- ``backends``: the stores that hold checkpoints: directories, S3.
- ``write``, ``read``: saves and loads.
- ``manage``: checkpoint roots, retention, repair, tools.
- ``shared_memory``: the files of the memory tier.
- ``mindspore``: files of MindSpore, read without MindSpore.
"""
