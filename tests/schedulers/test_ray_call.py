"""The call of a job on Ray, without Ray: refused arguments, and the name of a function."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import FrameworkError, ScriptError, UsageError
from holdfast.integrations.ray import run
from holdfast.integrations.ray.rank import IN_RANK
from holdfast.integrations.ray.shipped_function import find_place, load_function, name_function


def train(config: dict[str, Any]) -> None:
    """Do nothing: a function that every process finds."""


def refused(train: Callable[..., Any] | str = train, **given: Any) -> UsageError:
    """Return the error of a call."""
    with pytest.raises(UsageError) as caught:
        run(train, **{"name": "job", "num_nodes": 2, **given})
    assert caught.value.hint
    return caught.value


def test_without_ray_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FrameworkError, match="Ray cannot be imported") as caught:
        run(train, name="job", num_nodes=2)
    assert caught.value.hint == "pip install 'holdfast[ray]'"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_nodes": 0}, "num_nodes=0"),
        ({"num_nodes": (1, 2)}, "num_nodes="),
        ({"workers_per_node": True}, "workers_per_node=True"),
        ({"spares": -1}, "spares=-1"),
        ({"name": "a b"}, "is no name of a job"),
        ({"placement_strategy": "PACK"}, "placement_strategy='PACK'"),
        ({"node_timeout_s": float("nan")}, "node_timeout_s=nan"),
        ({"storage_path": "ckpts"}, "is relative"),
        ({"flags": "--grace-s 60"}, "is one text"),
        ({"flags": ["--nnodes", "4"]}, "--nnodes in flags"),
        ({"flags": ["--nproc_per_node=4"]}, "--nproc_per_node=4 in flags"),
        ({"args": ["--lr", "1"]}, "args is for a script"),
        ({"train_loop_config": {"model": object()}}, "train_loop_config"),
        ({"resources": {"CPU": -1}}, "CPU is -1"),
    ],
)
def test_arguments_that_cannot_work(given: dict[str, Any], said: str) -> None:
    assert said in refused(**given).message


def test_a_script_is_there_and_takes_no_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "there is no script none.py" in refused("none.py").message
    (tmp_path / "train.py").touch()
    assert "is for a function" in refused("train.py", train_loop_config={}).message


def test_functions_that_only_this_process_can_find() -> None:
    def nested() -> None: ...

    for function in (
        nested,
        lambda: None,
        functools.partial(train, {}),
        Path().touch,
        functools.cache(nested),
    ):
        refused(function)


def test_a_call_in_a_rank_is_a_missing_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IN_RANK, "1")
    assert "__main__" in refused().hint


def test_a_function_of_a_package_has_the_directory_of_the_package() -> None:
    named = name_function(train)
    assert (named.module, named.name) == (__name__, "train")
    assert str(Path(named.root) / named.file) == __file__
    assert name_function(json.dumps).root == ""  # part of an installed package


def test_a_function_of_the_driver_is_found_by_the_name_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "my_driver.py").write_text(
        "from holdfast.integrations.ray.shipped_function import name_function\n"
        "def train(): return 7\n"
        "if __name__ == '__main__': print(*name_function(train))\n"
    )
    (tmp_path / "my-driver.py").write_text((tmp_path / "my_driver.py").read_text())
    done = subprocess.run(
        [sys.executable, "my_driver.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["my_driver", "train", str(tmp_path), "my_driver.py"]
    bad = subprocess.run(
        [sys.executable, "my-driver.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "which no rank can import" in bad.stderr
    try:
        assert load_function("my_driver", "train", str(tmp_path))() == 7
        with pytest.raises(ScriptError, match="has no function evaluate"):
            load_function("my_driver", "evaluate", str(tmp_path))
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("my_driver", None)


def test_code_is_looked_for_in_the_copy_of_the_working_directory_first(tmp_path: Path) -> None:
    driver, here = tmp_path / "driver", tmp_path / "here"
    for place in (driver / "src", here / "src"):
        place.mkdir(parents=True)
    (driver / "src" / "train.py").touch()
    assert find_place(str(here), str(driver), str(driver / "src"), "train.py") == str(driver / "src")
    (here / "src" / "train.py").touch()
    assert find_place(str(here), str(driver), str(driver / "src"), "train.py") == str(here / "src")
    assert find_place(str(here), str(here), str(driver / "src"), "train.py") == str(driver / "src")
    assert find_place(str(here), str(driver), str(tmp_path / "none"), "train.py") == ""
