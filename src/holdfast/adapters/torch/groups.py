"""Process groups that can be poisoned, rehearsed and reconfigured under the names gloo and nccl."""

from __future__ import annotations

from holdfast.adapters.torch.fabric import Fabric, GroupAborted, fabric

__all__ = ["Fabric", "GroupAborted", "fabric"]
