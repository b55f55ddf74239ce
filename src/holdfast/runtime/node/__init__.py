"""The parts of a run that its processes on one host share.

These are the run directory and its settings, status pages, functions about processes, shared memory, and the registry
of frameworks.
"""
