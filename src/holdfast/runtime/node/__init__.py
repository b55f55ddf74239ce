"""What every process of a run knows of its host: the run directory and its settings, status pages, processes
and their evidence, shared memory, the registry of frameworks."""
