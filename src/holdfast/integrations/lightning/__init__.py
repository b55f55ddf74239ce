"""Lightning: ``Trainer(callbacks=[Holdfast()])``.

``callback`` drives the session. ``position`` is the position of Lightning's loops and the state of its callbacks.
``patches`` are the methods of a trainer that are replaced during ``fit``. ``once_per_process`` keeps what Lightning's
objects decide once in a process (log directories). ``supported`` refuses by name what cannot be protected.
"""

from holdfast.integrations.lightning.callback import Holdfast

__all__ = ["Holdfast"]
