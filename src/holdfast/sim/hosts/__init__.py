"""Simulation of a job on several hosts: elections, lost hosts, partitions, clocks and disks.

Theory. Each host runs the real state machines of agent and election. The elected host also runs the real controller.
The parts of ``runtime/`` around these state machines are models: processes, connections, the event log of the host, and
the file of its promises in elections. ``hosts_world.py`` connects the models.
"""
