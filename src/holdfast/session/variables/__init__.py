"""The variables of a script on which its updates depend, and the check that they continue with the job.

Module ``deciding_variables`` finds them in the source of the script. It uses three other modules. ``called_bodies``
inlines the script's functions where a loop calls them, in trees of ``script_trees``. ``update_sources`` finds the
expressions on which an update depends. ``data_flow`` finds the variables that a loop carries from one iteration to the
next.

Module ``update_variables`` reads the values in each step, and ``variable_history`` compares them with those of the
job. Module ``set_once`` finds those that a block sets once from a collective. Module ``unassigned_variables`` has the
placeholders for variables that a block did not assign. Module ``kept_attributes`` finds the attributes that objects in
``state=`` keep. Module ``state_variables`` reads the variables in ``state=``, which all ranks compare in each vote.
Module ``hidden_generators`` finds random generators that begin again in a new process.
The modules get plain values from ``plain_values``, and digests of large values from ``rare_digests``.
"""
