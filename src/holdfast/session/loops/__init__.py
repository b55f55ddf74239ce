"""The loops of a script over its steps: the next batch, the end of a loop, the finished epochs and phases."""
