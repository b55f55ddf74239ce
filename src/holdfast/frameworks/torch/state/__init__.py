"""The training state of one rank in PyTorch, and its reset after an aborted step.

It consists of parameters, buffers, optimizers, schedules, random numbers and the user's own state. The modules name
these values, find this rank's boxes of tensors, and make copies and digests.
"""
