"""The training state: names, boxes, optimizers, buffers, random numbers, digests, snapshots, and how wrappers are
reset after an aborted step."""
