"""The training state of one rank in PyTorch, and its reset after an aborted step.

The state consists of parameters, buffers, optimizers, schedules, random numbers and the user's own state. The modules
of this package name these values, find the boxes of tensors that this rank holds, and make copies and digests.
"""
