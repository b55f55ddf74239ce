"""Simulation of a job on a virtual clock, with the real controller, agent and step machines, and simulated workers.

``world`` runs a job that one seed determines. ``invariants`` are checked at every event. ``faults`` and ``injector``
make processes fail. ``model_checker`` and ``elections`` search all orders of events of a small case. ``goodput``
computes the cost of faults.
"""
