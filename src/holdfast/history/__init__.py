"""The history of a run, from its event log (pure).

- ``run_history``: the fold of all events into faults, seats, steps, checkpoints and the end.
- ``lost_time``: the time of a run that was no training, by cause.
"""
