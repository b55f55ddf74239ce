"""Lightning: ``Trainer(callbacks=[Holdfast()])``.

``callback`` drives the session, ``position`` is where Lightning's loops and callbacks are, ``patches`` are the
methods of a trainer that are replaced while it fits, ``once_per_process`` keeps what its objects decide once in a
process (log directories), and ``supported`` refuses by name what cannot be protected.
"""

from holdfast.integrations.lightning.callback import Holdfast

__all__ = ["Holdfast"]
