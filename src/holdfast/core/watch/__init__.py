"""What is noticed beside the death of a process: ``stall_detector`` and ``hang_detection`` (no progress),
``hang_attribution`` (which rank is to blame), ``stragglers``, ``corruption`` (copies that differ), ``recomputation``
(gradients that another rank computes differently)."""
