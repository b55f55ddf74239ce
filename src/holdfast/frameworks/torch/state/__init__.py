"""The training state of PyTorch, and its reset after an aborted step.

It consists of names, boxes, optimizers, buffers, random numbers, digests and snapshots.
"""
