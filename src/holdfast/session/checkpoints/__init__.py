"""The saves and loads of a session.

Module ``checkpointer`` saves, ``save_schedule`` decides when, and ``after_block`` starts the saves. Module ``resume``
loads. Module ``memory_tier`` keeps states in shared memory. Modules ``state_transfer`` and ``transfer_snapshot`` give
the state of a survivor to a replacement. Module ``sole_writer`` detects two runs in one directory, and ``job_root``
decides on the directory of the job.
"""
