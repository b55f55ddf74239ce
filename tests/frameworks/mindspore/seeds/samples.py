"""What the tests of the seeds share: a sample in a folder of its own, and the weights that it ends with."""

from __future__ import annotations

import shutil
from pathlib import Path

import mindspore as ms
import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent


def copied(sample: str, folder: Path) -> Path:
    """The files of ``sample`` (``000_last_gasp``, ...) in the new ``folder``."""
    shutil.copytree(HERE / sample, folder, dirs_exist_ok=True)
    return folder


def weights(file: Path) -> dict[str, NDArray[np.float32]]:
    """Name -> value of each parameter of MindSpore's checkpoint ``file``."""
    return {name: np.asarray(value.asnumpy()) for name, value in ms.load_checkpoint(str(file)).items()}


def same(one: Path, other: Path) -> bool:
    """Both files hold the same parameters, bit for bit."""
    first, second = weights(one), weights(other)
    return list(first) == list(second) and all(
        first[name].tobytes() == second[name].tobytes() for name in first
    )
