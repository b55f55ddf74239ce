"""The agent of one node: ``agentd`` is its process, ``zygote`` forks workers, ``worker_processes`` watches them,
``peers`` and ``leader_election`` connect it to other nodes, ``peer_replication`` copies states of ranks between nodes.
These components post the events in ``agent_events`` to their owner.
"""
