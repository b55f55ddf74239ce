"""The public API: its names, and the cost of its import."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import holdfast
from holdfast import version

IMPORT_S_MAX = 0.100
HELP_S_MAX = 0.150
RUNS = 7

# The public names. Adding one is a decision: add it here, to the README and to the changelog.
PUBLIC = [
    "AuthError",
    "BestInterval",
    "CheckpointInvalid",
    "CheckpointMismatch",
    "ComputeError",
    "DataError",
    "EmptyLoaderError",
    "EverySeconds",
    "EverySteps",
    "FaultError",
    "FrameworkError",
    "GroupError",
    "HoldfastError",
    "ImpureBlockError",
    "InternalError",
    "JobError",
    "JobSaved",
    "KeepEvery",
    "NonFiniteError",
    "NotMet",
    "NothingToResume",
    "PeerLost",
    "ProtocolError",
    "ScriptError",
    "StateError",
    "StepError",
    "StoreDenied",
    "StoreError",
    "StoreUnreachable",
    "StoreWriteError",
    "UnequalBatchesError",
    "UnmatchedCollectiveError",
    "UnsupportedError",
    "UsageError",
    "UserError",
    "__version__",
    "load",
    "once",
    "session",
]


def python(code: str) -> str:
    """Run ``code`` in a new interpreter. Return its output."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return result.stdout


def best_s(code: str) -> float:
    """Return the best of several runs of ``code``, which prints CPU seconds: other processes do not count in those."""
    return min(float(python(code)) for _ in range(RUNS))


def test_public_names() -> None:
    assert sorted(holdfast.__all__) == PUBLIC
    assert set(PUBLIC) <= set(dir(holdfast))


def test_errors_are_public() -> None:
    from holdfast import errors

    kinds = {
        n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, errors.HoldfastError)
    }
    assert kinds <= set(PUBLIC)
    for name in kinds:
        assert getattr(holdfast, name) is getattr(errors, name)


def test_unknown_names_are_refused() -> None:
    assert python("import holdfast\ntry: holdfast.sesion\nexcept AttributeError as e: print(e)").strip()


@pytest.mark.torch
def test_a_face_is_imported_at_its_first_use() -> None:
    assert python("import holdfast; print(holdfast.torch.declare.__name__)").strip() == "declare"


def test_a_session_shows_what_a_script_uses() -> None:
    from holdfast.session.session import OFFERED, Session

    shown = [name for name in dir(object.__new__(Session)) if not name.startswith("_")]
    assert sorted(shown) == sorted(OFFERED)
    assert [name for name in OFFERED if not hasattr(Session, name)] == ["root", "state"], "set when it opens"


def test_import_is_light() -> None:
    loaded = set(json.loads(python("import holdfast, json, sys; print(json.dumps(sorted(sys.modules)))")))
    assert loaded.isdisjoint({"torch", "asyncio", "click", "rich", "numpy", "aiohttp"})


def test_import_is_fast() -> None:
    took_s = best_s("import time; t = time.process_time(); import holdfast; print(time.process_time() - t)")
    assert took_s < IMPORT_S_MAX


def test_help_loads_only_what_it_needs() -> None:
    code = (
        "import json, sys\n"
        "from holdfast.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print('MODULES' + json.dumps(sorted(sys.modules)))"
    )
    output, _, listing = python(code).partition("MODULES")
    assert "run" in output and "drill" in output
    assert set(json.loads(listing)).isdisjoint({"torch", "asyncio", "numpy", "rich", "msgspec"})


@pytest.mark.parametrize(
    ("process", "spared"),
    [
        (
            "holdfast.cli.commands.run, holdfast.cli.start.launcher",
            {"torch", "asyncio", "numpy", "http.client"},
        ),
        ("holdfast.runtime.agent.agentd", {"torch", "numpy", "email.utils", "click", "rich"}),
    ],
)
def test_a_process_of_a_run_imports_what_it_needs(process: str, spared: set[str]) -> None:
    """Regression: a third of the imports of ``holdfast run`` were for its agent, whose own first one was NumPy."""
    listing = python(f"import json, sys, {process}; print(json.dumps(sorted(sys.modules)))")
    assert spared.isdisjoint(json.loads(listing))


def test_help_is_fast() -> None:
    """The time is that of the whole command, including the interpreter."""
    command = [str(Path(sys.executable).parent / "holdfast"), "--help"]
    code = (
        "import resource, subprocess; "
        f"subprocess.run({command!r}, check=True, stdout=subprocess.DEVNULL); "
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); print(used.ru_utime + used.ru_stime)"
    )
    assert best_s(code) < HELP_S_MAX


def test_the_command_is_a_module_as_well() -> None:
    texts = [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for command in (
            [str(Path(sys.executable).parent / "holdfast"), "--help"],
            [sys.executable, "-m", "holdfast", "--help"],
        )
    ]
    assert texts[0] == texts[1] and "drill" in texts[0]


def test_the_version_is_that_of_the_package_and_in_one_place() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert holdfast.__version__ == version.VERSION
    assert project["project"]["dynamic"] == ["version"] and "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": f"{version.__name__}.VERSION"}


def test_each_package_that_the_tests_install_is_pinned() -> None:
    """A release of a checker between two runs must not fail a commit that did not change."""
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    lines = [line for line in (root / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {_package(line) for line in lines if "==" in line}
    assert len(pinned) == len(lines)
    assert {_package(line) for line in wanted} <= pinned


def _package(requirement: str) -> str:
    """Return the name of a requirement in its normal form: lower case, with hyphens."""
    return re.split(r"[\[<>=~! ;]", requirement)[0].lower().replace("_", "-")
