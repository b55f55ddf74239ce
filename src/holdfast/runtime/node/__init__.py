"""What the processes of a run on one host share: the run directory and its settings, status pages, knowledge about
processes, shared memory, the registry of frameworks.
"""
