"""One step of a script: ``step`` runs the block, ``participant`` is the rank's side of the protocol, ``voting`` casts
and counts votes, ``block_proof`` and ``replica_check`` find what is not exact."""
