"""Library mode for torch: importing this before torch.distributed is used installs Holdfast's process groups.

``holdfast run`` does the same for every worker, so this import then changes nothing. ``declare`` says which region of a
larger tensor a plain tensor is.
"""

from __future__ import annotations

from holdfast.frameworks.torch.comm.backend import GroupAborted, fabric, install, installed
from holdfast.frameworks.torch.state.boxes import declare

__all__ = ["GroupAborted", "declare", "fabric", "install", "installed"]

install()
