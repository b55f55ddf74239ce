"""The imports at the head of a script that a zygote makes: which count, and what ends them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from holdfast import event_log
from holdfast.core.ids import Generation, MemberId
from holdfast.core.protocol.messages import Assignment
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir
from holdfast.runtime.node.script_imports import UNKNOWN, head_of, watching
from holdfast.runtime.node.spawn import SpawnOrder, differing, worker_env
from tests.session.launch import run_job


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a module beside the script, and with two installed packages."""
    installed = tmp_path / "lib" / "site-packages"
    for name in ("slow", "quick"):
        (installed / name).mkdir(parents=True)
        (installed / name / "__init__.py").write_text("")
    (tmp_path / "beside.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(installed), *sys.path])
    return tmp_path


@pytest.mark.parametrize(
    ("script", "made"),
    [
        ("import slow", ["import slow"]),
        ("'''A text.'''\nfrom __future__ import annotations\nimport os, sys\nimport slow as s\nfrom quick import a, b",
         ["import slow as s", "from quick import a, b"]),
        ("import slow\nimport os\nos.environ['HF_HOME'] = 'x'\nimport quick", ["import slow"]),
        ("import slow\nprint('hello')\nimport quick", ["import slow"]),
        ("import beside\nimport slow", []),
        ("import slow, beside", []),
        ("from . import slow", []),
        ("import lightning\nimport slow", []),
        ("import no_such_package\nimport slow", ["import slow"]),
        ("try:\n  import slow\n  has = True\nexcept ImportError:\n  has = False\nimport quick",
         ["import slow", "import quick"]),
        ("try:\n  import slow\nexcept ImportError:\n  print('no')\nimport quick", []),
        ("try:\n  import slow\nfinally:\n  go()\nimport quick", []),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  import beside\nimport slow", ["import slow"]),
        ("from typing import TYPE_CHECKING\nif not TYPE_CHECKING:\n  import beside\nimport slow", []),
        ("import typing\nif typing.TYPE_CHECKING:\n  import beside\nelse:\n  go()\nimport slow", []),
        ("def f(x=go()): ...\nimport slow", []),
        ("if True:\n  import slow", []),
        ("SIZE = 3\nWIDTH = SIZE * 2\nimport slow", []),
        ("SIZE = 3\ndef f():\n  import quick\nimport slow", ["import slow"]),
        ("@register\ndef f(): ...\nimport slow", []),
        ("import holdfast\nimport slow", ["import slow"]),
        ("this is no Python", []),
        ("", []),
    ],
)  # fmt: skip
def test_the_head_ends_at_the_first_statement_that_may_matter(
    places: Path, script: str, made: list[str]
) -> None:
    (places / "train.py").write_text(script)
    assert [one.text for one in head_of("script", str(places / "train.py"), places)] == made


@pytest.mark.parametrize(
    ("package", "made"),
    [("", ["import slow"]), ("import beside", []), ("import quick", ["import quick", "import slow"])],
)
def test_the_packages_of_a_module_come_first(places: Path, package: str, made: list[str]) -> None:
    (places / "pack").mkdir()
    (places / "pack" / "__init__.py").write_text(package)
    (places / "pack" / "train.py").write_text("import slow")
    assert [one.text for one in head_of("module", "pack.train", places)] == made


def test_a_missing_script_has_no_head(tmp_path: Path) -> None:
    assert head_of("script", str(tmp_path / "none.py"), tmp_path) == []


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("os.environ['RANK']", "RANK"),
        ("os.environ.get('RANK')", "RANK"),
        ("os.getenv('LOCAL_RANK', -1)", "LOCAL_RANK"),
        ("'RANK' in os.environ", "RANK"),
        ("'RANK' in list(os.environ) and os.environ['RANK']", "RANK"),
        ("[int(value) for name, value in os.environ.items() if name == 'SIZE']", ""),
        ("{**os.environ}", ""),
        ("list(os.environ) and os.environ.get('RANK')", "RANK"),
        ("[name for name in os.environ if name.startswith('FSSPEC_')]", ""),
        ("os.environ.get('HOME')", ""),
    ],
)
def test_a_look_at_a_variable_of_a_worker_is_seen(
    monkeypatch: pytest.MonkeyPatch, code: str, seen: str
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    plain = os.environ.__class__
    with watching({"RANK", "LOCAL_RANK"}) as looked_at:
        eval(code)
        found = looked_at()
    assert found == seen
    assert os.environ.__class__ is plain and "RANK" not in os.environ


def test_a_copy_of_the_environment_holds_no_wrong_rank() -> None:
    """A library that keeps the copy, and uses it as the rank in a worker, gets an error."""
    with watching({"RANK"}) as looked_at:
        kept = [dict(os.environ), os.environ.copy(), {**os.environ}]
        assert looked_at() == ""
    assert [copy["RANK"] for copy in kept] == [UNKNOWN] * 3
    with pytest.raises(ValueError, match=UNKNOWN):
        int(kept[0]["RANK"])


def test_the_variables_of_workers_are_all_known(tmp_path: Path) -> None:
    settings = RunSettings(
        run_id="t", target="train.py", nproc=2, rank_table="table.json", device_ids=(0, 1), env={"A": "1"}
    )
    order = SpawnOrder(
        Assignment(MemberId(1), 1, 1),
        Generation(1, 1),
        2,
        0,
        0,
        "",
        join=False,
        master_host="",
        master_port=1,
    )
    run = RunDir(tmp_path)
    found = differing(run, settings)
    assert set(worker_env(run, settings, order)) - found == {"OMP_NUM_THREADS", "HOLDFAST_RUN_DIR", "A"}
    assert "A" not in found and {"RANK", "RANK_ID", "MASTER_ADDR", "HOLDFAST_PAGE"} <= found


# ---------------------------------------------------------------- with processes

SCRIPT = """{imports}
import os
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
texts = [None, None]
dist.all_gather_object(texts, found())
Path("rank-" + os.environ["RANK"]).write_text(repr(texts))
dist.destroy_process_group()
"""
ONCE = "import os\nwith open(os.environ['NOTES'], 'a') as notes:\n    notes.write(__name__ + chr(10))\n"
PACKAGES = {
    "slow": ONCE,
    "ranked": ONCE + "RANK = int(os.environ.get('RANK', -1))\n",
    "threaded": ONCE
    + "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n",
    "taker": ONCE + "from torch.distributed import all_gather_object\n",
    "broken": ONCE + "raise ValueError('no')\n",
}


def imported(
    where: Path, monkeypatch: pytest.MonkeyPatch, imports: str, found: str
) -> tuple[list[str], str, list[str]]:
    """Run the imports as the head of a script on two workers.

    Returns: the packages that were imported, by all processes together; why the head ended; the text of each rank.
    """
    installed = where / "site-packages"
    for name, code in PACKAGES.items():
        (installed / name).mkdir(parents=True)
        (installed / name / "__init__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(installed), prepend=os.pathsep)
    monkeypatch.setenv("NOTES", str(where / "notes"))
    (where / "train.py").write_text(SCRIPT.format(imports=imports).replace("found()", found))
    done = run_job(where, 2, "--run-id", "it", "train.py")
    assert done.returncode == 0, done.stdout
    events = event_log.read(where / "runs/it/events.jsonl").events
    assert not [e for e in events if e.kind in {"zygote_unusable", "zygote_lost"}]
    (ready,) = [e.data for e in events if e.kind == "zygote_ready"]
    return (
        (where / "notes").read_text().split(),
        ready["head"],
        [(where / f"rank-{rank}").read_text() for rank in range(2)],
    )


@pytest.mark.torch
@pytest.mark.processes
def test_an_installed_package_is_imported_once_for_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, why, _ = imported(tmp_path, monkeypatch, "import slow", "slow.__name__")
    assert (notes, why) == (["slow"], "")


@pytest.mark.more
@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.executes_zygotes
def test_a_package_that_reads_the_rank_is_imported_by_each_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, why, ranks = imported(tmp_path, monkeypatch, "import slow, ranked\nimport taker", "ranked.RANK")
    assert why == "`import slow, ranked`: reads RANK" and ranks == ["[0, 1]"] * 2
    # The zygote has started again: all of the head in the first trial, nothing of it in the second.
    assert sorted(notes) == ["ranked"] * 3 + ["slow"] * 3 + ["taker"] * 2


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.executes_zygotes
@pytest.mark.more
def test_imports_before_one_that_starts_a_thread_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, why, _ = imported(tmp_path, monkeypatch, "import slow\nimport threaded", "1")
    assert why == "`import threaded`: starts a thread"
    assert sorted(notes) == ["slow"] * 2 + ["threaded"] * 3


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.executes_zygotes
@pytest.mark.more
def test_an_import_that_fails_is_made_by_each_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import slow\ntry:\n    import broken\nexcept ValueError:\n    broken = None"
    notes, why, ranks = imported(tmp_path, monkeypatch, code, "broken")
    assert why == "`import broken`: ValueError: no" and ranks == ["[None, None]"] * 2
    assert sorted(notes) == ["broken"] * 3 + ["slow"] * 2


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.more
def test_a_package_gets_the_functions_of_torch_that_workers_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = "taker.all_gather_object is dist.all_gather_object"
    notes, _, ranks = imported(tmp_path, monkeypatch, "import taker", same)
    assert notes == ["taker"] and ranks == ["[True, True]"] * 2


SESSION = """\
import sys
import torch
import holdfast
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = set(sys.modules)
with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpts") as s:
    for step in s.steps(until=2):
        with step:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
print("imported:", sorted(name for name in set(sys.modules) - before if name.startswith("holdfast")))
"""


@pytest.mark.torch
@pytest.mark.processes
def test_a_session_finds_all_modules_of_holdfast_loaded(tmp_path: Path) -> None:
    """Regression: each worker imported 150 of them, a third of the processor time of a short job."""
    (tmp_path / "train.py").write_text(SESSION)
    done = run_job(tmp_path, 1, "train.py")
    assert done.returncode == 0 and "imported: []" in done.stdout, done.stdout
