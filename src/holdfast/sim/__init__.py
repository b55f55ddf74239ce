"""Simulation of a job on a virtual clock.

The state machines of controller, agent and step are the real ones; the worker processes are simulated. ``world`` runs a
job that one seed determines. ``invariants`` holds the checks of such a run. ``faults`` and ``injector`` make processes
fail. ``model_checker`` and ``elections`` search all orders of events of a small case. ``goodput`` computes the cost of
faults.
"""
