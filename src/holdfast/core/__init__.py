"""The decisions of Holdfast as pure state machines: no clock, no I/O, no thread, no framework.

``controller``, ``agent`` and ``election`` are the machines of the control plane: events in, commands out.

- ``protocol``: the messages between processes, and the layout of the status page.
- ``worker``: the step protocol of one rank: its table, the vote, the agreement on layouts.
- ``decide``: the rules: the ladder of answers to a fault, the rule for the step of a broken job, when a run stops.
- ``job``: the life of a job and of a fault: members, recovery, replacement, last-gasp save, shutdown.
- ``watch``: what is noticed beside deaths: hangs, stragglers, copies that differ.

``ids`` and ``config`` are the vocabulary of all; ``launch_environment`` reads a process's place in its job.
"""
