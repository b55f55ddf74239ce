"""The state of one rank, as pure state machines.

- ``step``: the transition table of the step protocol.
- ``position``: the position of the script around the steps.
- ``vote``: the all-reduce before an update.
- ``layout_agreement``: the layouts that a rank has published.
"""
