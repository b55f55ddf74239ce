"""The variables of a script on which its updates depend, and the check that they continue with the job.

Module ``deciding_variables`` finds them in the source of the script. It uses three others: ``called_bodies`` puts the
bodies of the script's functions into the calls of a loop, ``update_sources`` tells from what an update follows, and
``data_flow`` tells what a loop takes over from one turn to the next. Module ``update_variables`` reads the values in
each step, and ``variable_history`` compares them with those of the job. Module ``set_once`` finds those that a
block sets once from a collective. Module ``unassigned_variables`` has the placeholders for variables that a block did
not assign.
"""
