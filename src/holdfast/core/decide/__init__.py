"""The rules of fault handling, as pure functions and tables.

- ``ladder``: the answer to a fault.
- ``decision``: the step at which the job continues.
- ``stop_policy``: the faults that end a run.
- ``unmatched_collectives``: the proof that a replacement makes other collectives between two steps than the others.
- ``recovery_phases``: the phases of a recovery.
"""
