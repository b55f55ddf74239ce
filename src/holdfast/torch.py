"""Library mode: ``import holdfast.torch`` before torch.distributed is used installs the process groups.

``holdfast run`` does the same for every worker; then this import changes nothing. ``declare`` says where a plain tensor
lies when it is a region of a larger one.
"""

from __future__ import annotations

from holdfast.frameworks.torch.comm.backend import GroupAborted, fabric, install, installed
from holdfast.frameworks.torch.state.boxes import declare

__all__ = ["Fabric", "GroupAborted", "declare", "fabric", "install", "installed"]

install()
