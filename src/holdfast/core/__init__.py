"""The decisions of Holdfast as pure state machines: no clock, no I/O, no thread, no framework.

``controller``, ``agent`` and ``election`` are the state machines of the control plane: events in, commands out.

- ``protocol``: the messages between processes, and the layout of the status page.
- ``worker``: the step protocol of one rank: its transition table, the vote, the agreement on layouts.
- ``decide``: the rules: the answer to a fault, the step at which a broken job continues, when a run stops.
- ``job``: the life of a job and of a fault: members, recovery, replacement, last-gasp save, shutdown.
- ``watch``: faults other than deaths: hangs, slow ranks, copies of the state that differ.

``ids`` and ``config`` are used by all. ``launch_environment`` reads rank, world size and node of a process from the
variables of its launcher. ``meeting`` decides when the connected agents are enough to begin a job.
"""
