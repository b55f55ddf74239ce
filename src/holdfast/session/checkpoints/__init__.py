"""Saves and loads of a session.

``checkpointer`` saves, ``save_schedule`` decides when, ``resume`` loads, ``memory_tier`` keeps states in memory.
``state_transfer`` and ``transfer_snapshot`` give the state of a survivor to a replacement.
"""
