"""Process groups that can be aborted and rebuilt under the user's handles.

``backend`` registers them, ``reconfigurable_group`` is what user code holds, ``comm_state`` what all groups of a
process share, ``gloo_abort`` and ``nccl_abort`` the ways out of a collective.
"""
