"""Checkpoints of other programs, read without running what they contain, and written for them."""
