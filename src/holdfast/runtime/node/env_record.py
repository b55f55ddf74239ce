"""The versions and the environment that a worker started with: one line of JSON per worker that ever held a rank.

Only variables of an allow-list are written, and none whose name or value looks like a secret. All other variables are
only counted.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from holdfast.runtime.node.rundir import open_log

NAMES = frozenset(
    "CONDA_DEFAULT_ENV CUDA_HOME HOME HOSTNAME LANG LC_ALL LD_LIBRARY_PATH LD_PRELOAD MALLOC_ARENA_MAX "
    "MASTER_ADDR MASTER_PORT PATH PWD PYTHONDONTWRITEBYTECODE PYTHONHASHSEED PYTHONPATH PYTHONUNBUFFERED RANK "
    "LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME "
    "RANK_ID RANK_SIZE RANK_TABLE_FILE DEVICE_ID TMPDIR TZ VIRTUAL_ENV TF_CONFIG".split()
)
PREFIXES = (
    "ASCEND_", "CUBLAS_", "CUDA_", "CUDNN_", "GLOO_", "GOMP_", "GRPC_", "HCCL_", "HOLDFAST_", "KMP_", "MKL_", "MS_",
    "NCCL_", "NVIDIA_", "OMP_", "OPENBLAS_", "PYTORCH_", "SLURM_JOB", "SLURM_NODE", "SLURM_PROCID", "TF_",
    "TORCHELASTIC_", "TORCH_", "XLA_",
)  # fmt: skip
SECRET = re.compile(r"TOKEN|SECRET|PASS|CREDENTIAL|AUTH|PRIVATE|COOKIE|(^|_)KEYS?($|_)|API", re.IGNORECASE)
ADDRESS_WITH_PASSWORD = re.compile(r"://[^/\s@]*:[^/\s@]*@")
VALUE_SIZE_MAX = 4096
PACKAGES = (
    "holdfast", "numpy", "torch", "mindspore", "tensorflow-cpu", "tensorflow", "tf-keras", "transformers", "accelerate",
    "lightning", "megatron-core", "msgspec",
)  # fmt: skip

FRAMEWORKS = ("torch", "mindspore", "tensorflow-cpu", "tensorflow")


class Started(msgspec.Struct, frozen=True):
    """One line of the record. ``withheld`` is the number of environment variables that are not recorded."""

    at: float  # Unix time
    rank: int
    member_id: int
    pid: int
    host: str
    versions: dict[str, str]
    environment: dict[str, str]
    withheld: int


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python, the kernel and the packages in ``PACKAGES`` that are installed.

    None of these packages is imported.
    """
    # Slow to import: not at the start of each agent.
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0], "kernel": f"{platform.system()} {platform.release()}"}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def alike() -> dict[str, str]:
    """Return the versions that should be equal on all nodes of a job: Python (major and minor) and frameworks."""
    found = {name: text for name, text in versions().items() if name in FRAMEWORKS}
    return {"python": "{}.{}".format(*sys.version_info), **found}


def allowed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``environment`` that may be recorded, sorted by name."""
    return {
        name: os.fsencode(value).decode(errors="replace")[:VALUE_SIZE_MAX]
        for name, value in sorted(environment.items())
        if (name in NAMES or name.startswith(PREFIXES))
        and SECRET.search(name) is None
        and ADDRESS_WITH_PASSWORD.search(value) is None
    }


def record(path: Path, rank: int, member_id: int) -> None:
    """Append the line of this process, which is worker ``member_id`` of ``rank``, to the file ``path`` (mode 0600).

    Raises:
        OSError: the file cannot be written.
    """
    shown = allowed(os.environ)
    line = Started(
        time.time(), rank, member_id, os.getpid(), platform.node(), versions(), shown, len(os.environ) - len(shown)
    )  # fmt: skip
    with os.fdopen(open_log(path), "ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")
