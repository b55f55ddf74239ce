"""The names of what listens in a run. Both ends of a connection derive its keys from one of them (``sealing.py``).

A name says which one is meant where both ends know that: a worker's agent is that of its node, a controller is that of
its term. So a connection for one of them cannot be led to another one.
"""

from __future__ import annotations

from holdfast.core.ids import Generation

PEERS = "peers"
"""Agents among each other. Which one has answered is said in its hello: the dialling one knows an address only."""
TTP = "TTP controller"


def agent_of(node: str) -> str:
    """Return the service name of the agent of a node, for its workers and for commands."""
    return f"agent of {node}"


def zygote_of(node: str) -> str:
    """Return the service name of the zygote of a node, for its agent."""
    return f"zygote of {node}"


def controller_of(term: int) -> str:
    """Return the service name of the controller of a term, for the agents."""
    return f"controller of term {term}"


def state_of(rank: int, generation: Generation) -> str:
    """The state of a rank that has stopped for ``generation``, for newcomers."""
    return f"state of rank {rank} in {generation}"


def memory_of(node: str) -> str:
    """The states that a node keeps in memory, for other nodes."""
    return f"memory of {node}"
