"""Process groups that can be aborted and rebuilt while user code keeps its references to them.

``backend`` registers them with torch. ``reconfigurable_group`` has the class of the groups that user code holds.
``comm_state`` holds the state that all groups of a process share. ``gloo_abort`` and ``nccl_abort`` end blocked
collectives. ``setup_record`` keeps the results of the collectives before the first step, for replacements.
"""
