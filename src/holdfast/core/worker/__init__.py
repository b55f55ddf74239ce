"""The state of one rank, as pure state machines.

- ``step``: the transition table of the step protocol.
- ``position``: the position of the script around the steps.
- ``decision_orders``: the orders of a decision, and the conditions under which each is carried out.
- ``worker_machine``: joins these machines and applies the controller's messages. Session and simulator drive it.
- ``vote``: the all-reduce before an update.
- ``layout_agreement``: the layouts that a rank has published.
"""
