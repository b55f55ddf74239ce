"""The framework-specific part of a session: one package per framework, behind the interface ``common.adapter``.

Support for another framework needs a package here (adapter, state, data position, worker setup, files) and an entry in
``runtime/node/framework_registry.py``.
"""
