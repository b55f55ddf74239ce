"""A job on a Ray cluster: ``run(train, name=..., num_nodes=..., spares=...)`` in a driver, ``status(name)`` anywhere.

``job`` has these two functions. ``driver`` lets Ray place the nodes, and ``supervisor`` watches them. ``node`` is the
actor of one node. ``keeper`` is the process that keeps the node's launcher. ``rank`` runs a training function, and
``shipped_function`` finds its name.
"""

from holdfast.integrations.ray.job import JobResult, run, status

__all__ = ["JobResult", "run", "status"]
