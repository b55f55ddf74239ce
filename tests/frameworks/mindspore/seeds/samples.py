"""Helpers of the tests of the seeds: a sample copied to its own folder, and its final weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import mindspore as ms
import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent


def copied(sample: str, folder: Path) -> Path:
    """Copy the files of ``sample`` (``000_last_gasp``, ...) to the new ``folder``. Return it."""
    shutil.copytree(HERE / sample, folder, dirs_exist_ok=True)
    return folder


def weights(file: Path) -> dict[str, NDArray[np.float32]]:
    """Return the value of each parameter in MindSpore's checkpoint ``file``, by name."""
    return {name: np.asarray(value.asnumpy()) for name, value in ms.load_checkpoint(str(file)).items()}


def same(one: Path, other: Path) -> bool:
    """Return whether both files hold the same parameters, bit for bit."""
    first, second = weights(one), weights(other)
    return list(first) == list(second) and all(
        first[name].tobytes() == second[name].tobytes() for name in first
    )
