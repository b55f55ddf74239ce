"""The life of a job and of each fault in it.

``job_state`` is what all parts share, ``membership`` which process holds a rank, ``node_tracker`` which node runs what.
``recovery`` drives a fault from its first sign to a committed step at full size, with ``situation`` (what is known),
``replacement`` (new processes in the place of lost ones), ``last_gasp`` (the emergency checkpoint) and ``wait_bounds``
(for how long it waits). ``shutdown`` ends a run; ``log_replay`` restores the state of a controller that is replaced.
"""
