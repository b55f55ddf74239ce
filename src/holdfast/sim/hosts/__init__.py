"""Several hosts in one simulation: elections beside a job, lost hosts, partitions, clocks and disks.

Theory. Each host runs the real agent and election machines, and the one that is elected the real controller. Around
them are models of what the shells of ``runtime/`` do: processes, connections, the event log of the host and its file of
promises. ``hosts_world.py`` puts them together.
"""
