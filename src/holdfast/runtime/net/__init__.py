"""Connections between the processes of a run: addresses, authenticated channels, and a request server.

``driver`` runs a pure state machine in an event loop. ``connection_limits`` limits the unauthenticated connections.
"""
