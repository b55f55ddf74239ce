"""Saving of checkpoints.

- ``writer``: writes one rank's share of a checkpoint.
- ``async_save``: copies the share into shared memory, so that training continues.
- ``writer_process``: the process that writes the share from the shared memory.
- ``staging``: the messages and the shared memory between the rank and the process that writes.
"""
