"""The loops of a script over its steps: drawing batches, ending loops, and counting finished epochs and phases."""
