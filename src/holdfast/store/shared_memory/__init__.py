"""The files of the memory tier: the newest states of each rank, and the log of the updates after these states."""
