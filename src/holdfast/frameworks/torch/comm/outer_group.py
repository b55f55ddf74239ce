"""The identity of a process group that user code holds: rank, size, name, backend, and the calls that it refuses.

:class:`OuterGroup` is the base of :class:`~holdfast.frameworks.torch.comm.reconfigurable_group.ReconfigurableGroup`.
torch calls its methods from C++ and from Python, even before the group has connections.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist

from holdfast.errors import UnsupportedError
from holdfast.frameworks.torch.comm.group_builder import GroupSpec


class OuterGroup(dist.ProcessGroup):
    """The part of a user's process group that does not depend on its connections.

    Args:
        spec: the parameters of the group.
    """

    def __init__(self, spec: GroupSpec) -> None:
        super().__init__(spec.rank, spec.world_size)  # type: ignore[call-arg]  # the form for Python subclasses
        self.spec = spec
        self._name = spec.name
        self._desc = "undefined"

    def rank(self) -> int:
        return self.spec.rank

    def size(self) -> int:
        return self.spec.world_size

    def getRank(self) -> int:
        return self.spec.rank

    def getSize(self) -> int:
        return self.spec.world_size

    def name(self) -> str:
        return self.spec.backends[0][1]

    def getBackendName(self) -> str:
        """Return ``holdfast``.

        Only C++ calls this. With ``gloo`` as the answer, C++ would look for gloo's backend object inside this group.
        """
        return "holdfast"

    def _get_backend_name(self) -> str:
        return self.name()

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device, _ in self.spec.backends]

    def _set_group_name(self, name: Any) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:
        return self._desc

    @property
    def group_name(self) -> Any:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the number was set when the inner group was built."""

    # ------------------------------------------------------------------ offers of torch 2.14 and later

    @property
    def supports_reconfigure(self) -> bool:
        """False: the control plane decides when this group gets new connections."""
        return False

    @property
    def supports_window(self) -> bool:
        """False: memory that is registered with a communicator does not survive the communicator."""
        return False

    @property
    def supports_abort_hooks(self) -> bool:
        """False: a hook is lost when the connections are replaced."""
        return False

    @property
    def supports_completion_hooks(self) -> bool:
        """False: a hook is lost when the connections are replaced."""
        return False

    def get_reconfigure_handle(self) -> NoReturn:
        """Raise UnsupportedError: Holdfast replaces the connections of this group."""
        self._refuse("get_reconfigure_handle")

    def reconfigure(self, opts: Any) -> NoReturn:
        """Raise UnsupportedError: Holdfast replaces the connections of this group."""
        self._refuse("reconfigure")

    def new_window(self, tensor: Any = None) -> NoReturn:
        """Raise UnsupportedError: the connections of this group are replaced after a fault."""
        self._refuse("new_window")

    def register_abort_hook(self, hook_id: int, hook: Any) -> NoReturn:
        """Raise UnsupportedError: the connections of this group are replaced after a fault."""
        self._refuse("register_abort_hook")

    def register_pre_hook(self, hook_id: int, hook: Any) -> NoReturn:
        """Raise UnsupportedError: the connections of this group are replaced after a fault."""
        self._refuse("register_pre_hook")

    def register_post_hook(self, hook_id: int, hook: Any) -> NoReturn:
        """Raise UnsupportedError: the connections of this group are replaced after a fault."""
        self._refuse("register_post_hook")

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Do nothing: no hook can be registered."""

    unregister_pre_hook = unregister_abort_hook
    unregister_post_hook = unregister_abort_hook

    def _refuse(self, method: str) -> NoReturn:
        raise UnsupportedError(
            f"{method}() of process group {self._name}: its connections are replaced after a fault",
            hint="leave recovery of this group to Holdfast, or make the group with another backend than gloo and nccl",
        )
