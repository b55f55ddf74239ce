"""The rules, as pure functions and tables.

- ``ladder``: the answer to a fault.
- ``decision``: the step at which the job continues.
- ``stop_policy``: when a run ends.
- ``recovery_phases``: the phases of a recovery.
"""
