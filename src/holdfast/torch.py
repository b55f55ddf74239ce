"""Library mode: ``import holdfast.torch`` before torch.distributed is used installs the process groups.

``holdfast run`` does the same for every worker; then this import changes nothing.
"""

from __future__ import annotations

from holdfast.adapters.torch.groups import Fabric, GroupAborted, fabric, install, installed

__all__ = ["Fabric", "GroupAborted", "fabric", "install", "installed"]

install()
