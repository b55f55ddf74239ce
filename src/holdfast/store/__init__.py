"""Checkpoints: written by each rank alone, verified whole before they are loaded.

Rooms: ``layouts`` (which rank holds which box of which tensor, and who writes it), ``format`` (the files),
``backends`` (directories, S3), ``write`` and ``read``, ``manage`` (roots, retention, repair, tools),
``shared_memory`` (the memory tier's files), ``mindspore`` (files of MindSpore, read without it).
"""
