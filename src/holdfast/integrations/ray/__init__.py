"""A job on a Ray cluster: ``run(train, name=..., num_nodes=..., spares=...)`` in a driver, ``status(name)`` anywhere.

``job`` is that call, ``driver`` has the nodes placed, ``supervisor`` watches them, ``node`` is the actor of one node,
``keeper`` keeps its launcher, and ``rank`` runs a training function that ``shipped_function`` has named.
"""

from holdfast.integrations.ray.job import JobResult, run, status

__all__ = ["JobResult", "run", "status"]
