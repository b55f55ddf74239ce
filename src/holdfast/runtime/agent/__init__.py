"""The agent, of which each node has one.

``agentd`` is its process. ``zygote`` forks the workers, and ``worker_processes`` watches them. ``peers`` and
``leader_election`` connect the agent to the agents of other nodes. ``peer_replication`` copies the states of ranks to
another node. Each component posts the events of ``agent_events`` to the object that owns it.
"""
