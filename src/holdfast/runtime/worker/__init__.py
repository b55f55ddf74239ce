"""The inside of a worker process: ``entry`` runs the user's script, ``worker_client`` is the connection to the agent,
``state_transfer`` serves and fetches state, ``library_mode`` is a run without ``holdfast run``.
"""
