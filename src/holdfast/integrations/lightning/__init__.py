"""The integration of Lightning: ``Trainer(callbacks=[Holdfast()])``.

``callback`` drives the session. ``position`` has the position of Lightning's loops and the state of its callbacks.
``patches`` has the methods of a trainer that are replaced during ``fit``. ``once_per_process`` keeps the decisions that
Lightning's objects make once in a process (log directories). ``supported`` refuses by name the modules and trainers
that cannot be protected.
"""

from holdfast.integrations.lightning.callback import Holdfast

__all__ = ["Holdfast"]
