"""The code of Holdfast that runs inside a worker process.

``entry`` runs the user's script. ``worker_client`` is the connection to the agent. ``state_transfer`` serves and
fetches state. ``script_frames`` finds the stack frames of the script. ``library_mode`` starts the agent of a script
that runs without ``holdfast run``.
"""
