"""A torch that cannot work, or an untested version: one error with the next command, or a self-test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import event_log
from holdfast.errors import FrameworkError
from holdfast.runtime.node import torch_build as builds
from holdfast.runtime.node.torch_build import TESTED_MOST, SelfTestVerdict, TorchBuild, torch_build, try_out
from tests.cli.command import HOLDFAST

NO_LIBRARY = "libcudnn.so.9: cannot open shared object file: No such file or directory"
LOADED = """
from types import SimpleNamespace
from .version import __version__
distributed = SimpleNamespace(is_available=lambda: False)
"""
BROKEN = f"""
import sys
if "once" in sys.__dict__:
    raise ImportError("torch can only be initialized once per process")
sys.once = True
raise ImportError({NO_LIBRARY!r})
"""
NEWER = f"{TESTED_MOST[0]}.{TESTED_MOST[1] + 1}.0"


def a_torch(where: Path, version: str, *, recorded: str = "", code: str = LOADED) -> Path:
    """Write a package named torch. ``recorded``: the version in the installation's metadata."""
    (where / "torch").mkdir(parents=True)
    (where / "torch" / "__init__.py").write_text(code)
    (where / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
    if recorded:
        info = where / f"torch-{recorded}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {recorded}\n")
    return where


def run(where: Path, packages: Path, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script of two ranks under ``holdfast run``, with ``packages`` first in the path."""
    (where / "train.py").write_text(script)
    return subprocess.run(
        [HOLDFAST, "run", "--nproc-per-node", "2", "train.py"], cwd=where, timeout=100,
        env={**os.environ, "PYTHONPATH": str(packages), **env}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("version", "recorded", "said"),
    [
        ("2.11.0", "2.11.0", "torch 2.11.0 is too old"),
        ("2.13.0", "2.15.0", "its files are of 2.13.0, the installation records 2.15.0"),
    ],
)
def test_a_torch_that_is_too_old_or_installed_by_halves_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, recorded: str, said: str
) -> None:
    monkeypatch.syspath_prepend(str(a_torch(tmp_path, version, recorded=recorded)))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(FrameworkError, match=said) as caught:
        torch_build()
    assert caught.value.hint.startswith("pip install")


def test_local_parts_of_a_version_are_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels of PyPI record 2.15.0, while their files have 2.15.0+cu132."""
    monkeypatch.syspath_prepend(str(a_torch(tmp_path, "2.15.0+cu132", recorded="2.15.0")))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    build = torch_build()
    assert build is not None and build.version == (2, 15) and not build.is_newer


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "version", "said"),
    [
        (BROKEN, "2.15.0", f"torch cannot be loaded: {NO_LIBRARY}"),
        pytest.param(
            LOADED, "2.15.0", "torch 2.15.0 was built without torch.distributed", marks=pytest.mark.more
        ),
        (LOADED, "2.11.0", "torch 2.11.0 is too old"),
    ],
)
def test_a_job_with_a_torch_that_cannot_work_ends_with_the_reason(
    tmp_path: Path, code: str, version: str, said: str
) -> None:
    packages = a_torch(tmp_path / "packages", version, recorded=version, code=code)
    done = run(tmp_path, packages, "import torch\n")
    assert done.returncode == 3, done.stdout + done.stderr
    error = done.stderr.partition("error: ")[2]
    assert said in error and "next: " in error and "pip install" in error, done.stderr


def test_a_verdict_is_kept_for_one_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def self_test() -> str:
        tried.append("once")
        return "it breaks"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(builds, "_self_test", self_test)
    for identity in ("a", "a", "b"):
        try_out.cache_clear()
        assert try_out(TorchBuild(NEWER, identity)) == SelfTestVerdict(NEWER, "it breaks")
    assert len(tried) == 2
    assert [path.stat().st_mode & 0o777 for path in tmp_path.rglob("*.json")] == [0o600, 0o600]
    try_out.cache_clear()


UNTESTED = """
import holdfast.runtime.node.torch_build as builds
builds.TESTED_MOST = (2, 11)
"""
OTHER_HELPER = """
import importlib.abc, importlib.util, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch.distributed.distributed_c10d":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            known = module._new_process_group_helper
            module._new_process_group_helper = lambda *args, **named: known(*args, **named)
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder())
"""
TRAIN = """
import os, signal
from pathlib import Path
import torch, torch.distributed as dist, holdfast
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
rank, model = dist.get_rank(), DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), 4)
with holdfast.session(model=model, optimizer=optimizer, save_every_steps=100) as s:
    for step in s.steps(loader, until=8):
        with step as (batch,):
            loss = model(batch * (rank + 1)).square().mean()
            if rank == 1 and step.number == 5 and not Path("struck").exists():
                Path("struck").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    print("ends", rank, s.step, weights.numpy().tobytes().hex(), type(dist.group.WORLD).__name__, flush=True)
dist.destroy_process_group()
"""


def _ends(where: Path) -> list[str]:
    logs = [log.read_text() for log in sorted(where.glob("runs/*/attempt-*/rank-*.log"))]
    return sorted(line for log in logs for line in log.splitlines() if line.startswith("ends "))


def _actions(where: Path) -> list[str]:
    (log,) = where.glob("runs/*/events.jsonl")
    return [str(e.data["action"]) for e in event_log.read(log).events if e.kind == "verdict"]


@pytest.mark.more
@pytest.mark.torch
@pytest.mark.processes
def test_a_newer_torch_is_tried_once_and_trains_either_way(tmp_path: Path) -> None:
    """Known groups are repaired in place, unknown groups by a restart. The weights are the same."""
    packages, cache = tmp_path / "packages", str(tmp_path / "cache")
    places = known, other = tmp_path / "known", tmp_path / "other"
    for place in (packages, *places):
        place.mkdir()
    site = packages / "sitecustomize.py"

    site.write_text(UNTESTED)
    done = run(known, packages, TRAIN, XDG_CACHE_HOME=cache)
    assert done.returncode == 0 and "its self-test has passed" in done.stderr, done.stderr
    assert _actions(known) == ["replace"]

    for verdict in Path(cache).rglob("*.json"):
        verdict.unlink()
    site.write_text(UNTESTED + OTHER_HELPER)
    done = run(other, packages, TRAIN, XDG_CACHE_HOME=cache)
    assert done.returncode == 0, done.stderr
    assert "warning: torch" in done.stderr and "_new_process_group_helper" in done.stderr, done.stderr
    assert _actions(other) == ["restart_last_gasp"]

    assert [line.split()[-1] for line in _ends(other)] == ["ProcessGroup"] * 2
    assert [line.split()[:-1] for line in _ends(known)] == [line.split()[:-1] for line in _ends(other)]


def test_the_smoke_test_of_the_newest_version_installs_no_older_one_than_the_tested() -> None:
    wanted = (Path(__file__).parents[2] / "requirements-newest.txt").read_text().splitlines()
    assert wanted[-1] == f"torch>={TESTED_MOST[0]}.{TESTED_MOST[1]}"
