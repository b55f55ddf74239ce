"""The memory tier's files: the newest states of each rank, and the log of the updates since."""
