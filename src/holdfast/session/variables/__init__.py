"""The variables of a script on which its updates depend, and the check that they continue with the job.

Module ``deciding_variables`` finds them in the source of the script. For this it uses ``called_bodies``, which puts the
bodies of the script's functions into the calls of a loop, and ``data_flow``, which tells what a loop takes over from
one turn to the next. Module ``update_variables`` reads their values in each step, and ``variable_history`` compares
them with those of the job.
"""
