"""Classes as a library has them: their code is in no file of the script."""

from __future__ import annotations

from typing import Any

_SOURCE = '''
import torch


class AverageMeter:
    """As in timm."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.sum, self.count = 0.0, 0

    def update(self, value):
        self.sum += float(value)
        self.count += 1

    __call__ = update

    def compute(self):
        return self.sum / self.count


class Metric(torch.nn.Module):
    """As in torchmetrics: ``state_dict()`` leaves out the states."""

    def __init__(self):
        super().__init__()
        self._defaults = {"total": torch.zeros(())}
        self.reset()

    def reset(self):
        self.total = self._defaults["total"].clone()

    def update(self, value):
        self.total = self.total + float(value)

    forward = update

    def compute(self):
        return self.total
'''
_names: dict[str, Any] = {"__name__": "meters"}
exec(compile(_SOURCE, "/lib/site-packages/meters.py", "exec"), _names)
AverageMeter, Metric = _names["AverageMeter"], _names["Metric"]
