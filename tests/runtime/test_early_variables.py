"""Variables that a script sets before it imports torch are found in its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.runtime.node.early_variables import COMPUTED, early_variable, sources

ENV = {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch", "train.py:2: OMP_NUM_THREADS"),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch", ""),
        ("import os\nimport torch\nos.environ['OMP_NUM_THREADS'] = '4'", ""),
        ("import os\nos.environ.setdefault('OMP_NUM_THREADS', '4')\nimport torch", ""),
        ("import os\nos.environ.setdefault('TORCH_LOGS', '+dynamo')\nimport torch", "train.py:2: TORCH_LOGS"),
        ("import os\nos.environ.update(MKL_NUM_THREADS='2')\nimport torch", "train.py:2: MKL_NUM_THREADS"),
        ("import os\nos.environ |= {'KMP_BLOCKTIME': '0'}\nimport torch", "train.py:2: KMP_BLOCKTIME"),
        ("from os import environ\nenviron[name] = '4'\nimport torch", f"train.py:2: {COMPUTED}"),
        ("import os\nos.putenv('PYTORCH_JIT', '0')\nfrom torch import nn", "train.py:2: PYTORCH_JIT"),
        ("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'\nimport torch", ""),
        ("import os\nos.environ['TORCH_NCCL_BLOCKING_WAIT'] = '1'\nimport torch", ""),
        ("def late():\n  import torch\nimport os\nos.environ['OMP_NUM_THREADS'] = '4'\nlate()",
         "train.py:4: OMP_NUM_THREADS"),
        ("import settings\nimport torch", "settings.py:2: TORCH_LOGS"),
        ("from pack import other\nimport torch", "other.py:1: TORCH_LOGS"),
        ("import model, settings\nimport torch", ""),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  import torch\nimport settings",
         "settings.py:2: TORCH_LOGS"),
        ("from typing import TYPE_CHECKING\nif not TYPE_CHECKING:\n  import settings\nimport torch",
         "settings.py:2: TORCH_LOGS"),
        ("this is no Python", ""),
    ],
)  # fmt: skip
def test_a_variable_counts_until_torch_is_imported(tmp_path: Path, script: str, found: str) -> None:
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "settings.py").write_text("import os\nos.environ['TORCH_LOGS'] = 'graph'\n")
    (tmp_path / "model.py").write_text("import torch.nn\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "other.py").write_text("from os import environ; environ['TORCH_LOGS'] = 'graph'\n")
    assert early_variable(*sources("script", str(tmp_path / "train.py"), Path("/")), ENV) == found


def test_the_sources_of_a_module_are_those_of_its_packages_and_its_own(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "go.py").write_text("import os\nfrom . import settings\nimport torch\n")
    (tmp_path / "pack" / "settings.py").write_text("import os\nos.environ['TORCH_LOGS'] = 'graph'\n")
    assert early_variable(*sources("module", "pack.go", tmp_path), ENV) == "settings.py:2: TORCH_LOGS"
