"""The steps of a session: running a block, voting on its update, and checking that it can run again.

Module ``step`` runs a block, ``participant`` is the rank's side of the step protocol, ``voting`` casts and counts
votes. Module ``block_proof`` finds blocks that compute other results when they run again. Module ``replica_check``
finds ranks whose copies of the state differ. Module ``loop_ends`` lets the ranks meet at the end of a loop over steps.
"""
