"""Connections: ``channel`` (authenticated sockets), ``driver`` (runs a pure machine in an event loop),
``request_server``, addresses, and the limits for connections of strangers."""
