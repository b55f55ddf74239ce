"""The life of a job and of each fault in it.

- ``job_state``: the state that all parts share.
- ``membership``: which process holds a rank.
- ``node_tracker``: which process runs on which node.
- ``recovery``: handles a fault from its detection to a committed step of all ranks. It uses ``situation`` (the
  evidence), ``replacement`` (new processes in the seats of lost ones), ``last_gasp`` (the emergency checkpoint) and
  ``wait_bounds`` (its time limits).
- ``failed_nodes``: which nodes have no ranks because they failed too often. ``node_faults`` records their faults.
- ``shutdown``: the end of a run.
- ``log_replay``: the state that a new controller reads from the log.
"""
