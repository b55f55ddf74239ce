"""Simulation of a job on several hosts: elections, lost hosts, partitions, clocks and disks.

Theory. Each host runs the real state machines of agent and election. The elected host also runs the real state machine
of the controller. The other parts of ``runtime/`` are replaced by models: processes, connections, the event log of a
host, and its file of election votes. ``hosts_world.py`` connects the models.
"""
