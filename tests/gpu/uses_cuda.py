"""A module for ``--preload`` that uses the device when it is imported, so that a fork of its process cannot use it."""

import torch

torch.zeros(1, device="cuda")
