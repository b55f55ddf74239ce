"""The protocol on a virtual clock: the real controller, agents and step machines, simulated workers, one seed.

``world`` runs it, ``invariants`` are checked at every event, ``faults`` and ``injector`` disturb it,
``model_checker`` and ``elections`` search all orders of a small case, ``goodput`` computes the cost of faults.
"""
