"""The documents' data sets in their own file formats, made of scikit-learn's handwritten digits."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049
CIFAR_DIGITS = 1000
CIFAR_RECORDS = 10_000
"""Of a file: Cifar10Dataset takes no other number."""


def write_mnist(folder: Path, count: int) -> None:
    """Write ``count`` images of 28 x 28 grey pixels as ``folder/train``: the two idx files of MNIST."""
    images, labels = _digits(count, 28)
    train = folder / "train"
    train.mkdir(parents=True)
    header = struct.pack(">4I", IMAGES_MAGIC, count, 28, 28)
    (train / "train-images-idx3-ubyte").write_bytes(header + images.tobytes())
    (train / "train-labels-idx1-ubyte").write_bytes(
        struct.pack(">2I", LABELS_MAGIC, count) + labels.tobytes()
    )


def write_cifar10(folder: Path) -> None:
    """Write records of one label and 3 x 32 x 32 pixels as ``folder/data_batch_1.bin``: the digits, several times."""
    images, labels = _digits(CIFAR_DIGITS, 32)
    planes = np.repeat(images.reshape(CIFAR_DIGITS, 1, -1), 3, axis=1).reshape(CIFAR_DIGITS, -1)
    records = np.concatenate([labels[:, None], planes], axis=1)
    (folder / "data_batch_1.bin").write_bytes(np.resize(records, (CIFAR_RECORDS, records.shape[1])).tobytes())


def _digits(count: int, width: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images, uint8 (count, width, width), in the middle of a black frame, and labels, uint8 (count,)."""
    digits = load_digits()
    enlarged = np.kron(digits.images[:count], np.ones((3, 3))) * (255 / 16)
    before = (width - enlarged.shape[1]) // 2
    after = width - enlarged.shape[1] - before
    framed = np.pad(enlarged, ((0, 0), (before, after), (before, after)))
    return framed.astype(np.uint8), digits.target[:count].astype(np.uint8)
