"""Messages and shared words of the processes of a run.

``messages`` (agent, controller, worker), ``peer_messages`` (between agents, elections), ``health_messages``
(evidence and paces), ``layout_messages``, and the bits of the ``status_page``.
"""
