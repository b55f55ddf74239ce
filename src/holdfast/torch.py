"""Library mode for torch: this import installs Holdfast's process groups. Import it before torch.distributed is used.

Under ``holdfast run`` the groups are already installed, so this import changes nothing. ``declare`` tags a plain tensor
with its region of a larger tensor.
"""

from __future__ import annotations

from holdfast.frameworks.torch.comm.backend import GroupAborted, fabric, install, installed
from holdfast.frameworks.torch.state.boxes import declare

__all__ = ["GroupAborted", "declare", "fabric", "install", "installed"]

install()
