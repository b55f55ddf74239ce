"""The rules, as pure functions and tables.

``ladder`` (which answer a fault gets), ``decision`` (at which step the job stands), ``stop_policy`` (when a run ends),
``recovery_phases`` (the phases of a recovery).
"""
