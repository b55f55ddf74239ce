"""Modules that the processes of a run on one host share.

They contain the run directory and its settings, status pages, functions about processes, shared memory, and the
registry of frameworks.
"""
