"""The processes and sockets around the pure state machines of ``core``.

Packages, each of which uses only those before it: ``net`` (channels), ``node`` (run directory, status pages, processes
of one host), ``rank_table``, ``worker`` (inside a worker process), ``agent`` (one per node), ``controller`` (one per
job).
"""
