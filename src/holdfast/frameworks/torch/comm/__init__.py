"""Process groups that can be aborted and rebuilt while user code keeps its references to them.

``backend`` registers them with torch. ``reconfigurable_group`` has the class of the groups that user code holds.
``comm_state`` holds the state that all groups of a process share. ``gloo_abort`` and ``nccl_abort`` end blocked
collectives. ``setup_record`` keeps what the collectives before the first step returned, for replacements, and
``lasting_results`` what DDP uses in all passes.
"""
