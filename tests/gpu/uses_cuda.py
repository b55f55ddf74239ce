"""A module for ``--preload`` that uses the device when it is imported; a fork of its process cannot."""

import torch

torch.zeros(1, device="cuda")
