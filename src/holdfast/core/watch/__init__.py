"""Detection of faults other than the death of a process.

- ``stall_detector`` and ``hang_detection``: no progress.
- ``hang_attribution``: the rank that causes a hang.
- ``activity``: progress during a recovery.
- ``stragglers``: slow ranks.
- ``corruption``: copies of the state that differ between ranks.
- ``recomputation``: gradients that another rank computes differently.
"""
