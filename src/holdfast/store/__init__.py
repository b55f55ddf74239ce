"""Checkpoints: each rank writes its part alone, and a load verifies the whole before it uses it.

- ``layouts``: the parts of the tensors that each rank holds, and the parts that it writes.
- ``format``: the files.
- ``backends``: directories, S3.
- ``write``, ``read``: saves and loads.
- ``manage``: checkpoint roots, retention, repair, tools.
- ``shared_memory``: the files of the memory tier.
- ``mindspore``: files of MindSpore, read without it.
"""
