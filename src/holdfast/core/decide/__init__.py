"""The rules of fault handling, as pure functions and tables.

- ``ladder``: the answer to a fault.
- ``decision``: the step at which the job continues.
- ``stop_policy``: the faults that end a run.
- ``unmatched_collectives``: the proof that a replacement makes different collectives between two steps from the other
  ranks.
- ``unequal_batches``: the proof that the ranks have different numbers of batches.
- ``recovery_phases``: the phases of a recovery.
"""
