"""The names of the services that listen in a run. Both ends of a connection derive its keys from the service name.

The name of an agent's service includes the agent's node. The exception is ``PEERS``, the service for other agents. The
name of a controller's service includes the controller's term. Therefore a connection to one agent cannot be redirected
to another agent. See ``sealing.py``.
"""

from __future__ import annotations

from holdfast.core.ids import Generation

PEERS = "peers"
"""Service name of an agent for other agents. It names no node, because the connecting agent knows only an address. The
agent that accepts names its node in its first message."""
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
    """Return the service name under which a rank serves its state to the newcomers of ``generation``."""
    return f"state of rank {rank} in {generation}"


def memory_of(node: str) -> str:
    """Return the service name under which a node serves the states in its memory to other nodes."""
    return f"memory of {node}"
