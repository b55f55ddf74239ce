"""Checkpoints of other programs: reading them without executing their content, and writing them."""
