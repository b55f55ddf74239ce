"""A job on a Ray cluster: ``run(train, name=..., num_nodes=..., spares=...)`` in a driver, ``status(name)`` anywhere.

``job`` is that call. ``driver`` lets Ray place the nodes, ``supervisor`` watches them. ``node`` is the actor of one
node, and ``keeper`` keeps the launcher of the node. ``rank`` runs a training function, which ``shipped_function``
names.
"""

from holdfast.integrations.ray.job import JobResult, run, status

__all__ = ["JobResult", "run", "status"]
