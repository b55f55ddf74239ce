"""What a session needs from a framework: one package per framework behind ``common.adapter``.

A framework is its package here (adapter, state, data position, worker setup, files) and its entry in
``runtime/node/framework_registry.py``.
"""
