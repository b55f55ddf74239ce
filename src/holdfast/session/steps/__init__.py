"""The steps of a session: running a block, voting on its update, and checking that it can run again.

``step`` runs a block, ``participant`` is the rank's side of the step protocol, ``voting`` casts and counts votes,
``block_proof`` and ``replica_check`` look for results that are not exact.
"""
