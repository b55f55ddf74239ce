"""Saves and loads of a session: ``checkpointer``, ``save_schedule``, ``resume``, ``memory_tier``, and the state that a
survivor gives to a replacement (``state_transfer``, ``transfer_snapshot``)."""
