"""Saving: ``writer`` writes one rank's share, ``async_save`` stages it in shared memory, and ``writer_process`` writes
it beside the training."""
