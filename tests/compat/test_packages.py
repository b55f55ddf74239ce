"""The packages as files: written, importable, removed; a package of another origin is not touched."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from holdfast.compat.packages import ALIASES, PACKAGES, remove, write
from holdfast.errors import UsageError
from tests.cli.command import Run, clean_environment
from tests.cli.conftest import holdfast  # noqa: F401  # the fixture


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=clean_environment(env), capture_output=True, text=True
    )


def test_installed_packages_are_ours_and_go_again(tmp_path: Path, holdfast: Run) -> None:  # noqa: F811
    done = holdfast("compat", "install", "--into", str(tmp_path))
    assert done.returncode == 0 and "mindio_ttp and taskd are in" in done.stdout
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    used = python(
        "import mindio_ttp.framework_ttp as ttp, taskd.api.taskd_agent_api as agent\n"
        "import holdfast.compat.framework_ttp as our\n"
        "assert ttp is our and agent.register_func; print(ttp.tft_is_reboot_node())", PYTHONPATH=path)  # fmt: skip
    assert used.stdout == "False\n", used.stderr
    assert "removed" in holdfast("compat", "remove", "--into", str(tmp_path)).stdout
    assert not list(tmp_path.iterdir())
    assert "nothing" in holdfast("compat", "remove", "--into", str(tmp_path)).stdout


def test_a_package_of_somebody_else_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "taskd").mkdir()
    (tmp_path / "taskd" / "__init__.py").write_text("theirs = 1\n")
    with pytest.raises(UsageError, match="not Holdfast's"):
        write(tmp_path)
    assert remove(tmp_path) == [] and not (tmp_path / "mindio_ttp").exists()


def test_one_import_is_enough_and_torch_is_not_loaded() -> None:
    done = python(
        "import sys, holdfast.compat.install\n"
        "import mindio_ttp.framework_ttp as ttp\n"
        "from taskd.api.taskd_agent_api import init_taskd_agent\n"
        "assert 'torch' not in sys.modules and 'mindspore' not in sys.modules\n"
        "print(ttp.Action.EXIT.value, init_taskd_agent({}))"
    )
    assert done.stdout == "1 False\n", done.stderr


def test_every_alias_has_a_target_and_a_package_that_holds_it() -> None:
    for name, target in ALIASES.items():
        assert not target or find_spec(target) is not None, name
        parent = name.rpartition(".")[0]
        assert name in PACKAGES if not parent else ALIASES[parent] == "", name
