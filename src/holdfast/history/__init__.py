"""The history of a run, from its event log (pure).

- ``run_history``: the fold of all events into faults, seats, steps, checkpoints and the end.
- ``host_history``: the hosts of a run on several hosts.
- ``lost_time``: the time of a run in which no training progressed, by cause.
"""
