"""A zygote that is forked from the server of tests is the process that the agent would have executed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.session.launch import run_job
from tests.zygotes.hook.sitecustomize import SERVER

pytestmark = [pytest.mark.torch, pytest.mark.processes]

LOOK = """
import gc, json, os, signal, socket, sys, threading, warnings
from pathlib import Path
import torch

def words(name):
    return Path("/proc/self", name).read_bytes().rstrip(b"\\0 ").decode().split("\\0")

def look():
    main, files = sys.modules["__main__"], Path("/proc/self/fd")
    status = ("Umask", "SigBlk", "SigIgn", "SigCgt", "Cap", "NoNewPrivs", "Threads", "Cpus_allowed")
    return {
        "command": words("cmdline"),
        "name": Path("/proc/self/comm").read_text(),
        "environment at the start": sorted(words("environ")),
        "environment": sorted(f"{name}={value}" for name, value in os.environ.items()),
        "directory": os.getcwd(),
        "leader": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "limits": Path("/proc/self/limits").read_text(),
        "status": [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(status)],
        "handlers": [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "files": sorted((link.name, os.readlink(link)) for link in files.iterdir() if link.exists()),
        "streams": [[s.encoding, s.errors, s.line_buffering] for s in (sys.stdin, sys.stdout, sys.stderr)],
        "python": [sys.argv, sys.orig_argv, sys.executable, sys.prefix, sys.path, str(sys.flags)],
        "main": [main.__spec__.name, main.__file__, main.__package__],
        "modules": sorted(sys.modules),
        "finders": [getattr(finder, "__name__", str(type(finder))) for finder in sys.meta_path],
        "warnings": repr(warnings.filters),
        "settings": [gc.isenabled(), gc.get_threshold(), sys.getrecursionlimit(), socket.getdefaulttimeout()],
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()],
        "parent": Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(),
    }

Path(os.environ["HOLDFAST_RUN_DIR"], "looked.json").write_text(json.dumps(look()))
"""
"""A module for the zygote to preload: it writes what the zygote is at the end of its imports."""


def looked(where: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], str]:
    """Run a job in ``where``. Return what its zygote is, and the command of the zygote's parent."""
    where.mkdir()
    (where / "look.py").write_text(LOOK)
    (where / "train.py").write_text("")
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{where}{os.pathsep}{os.environ['PYTHONPATH']}")
        done = run_job(where, 1, "--run-id", "it", "--preload", "look", "train.py")
    assert done.returncode == 0, done.stdout
    text = (where / "runs" / "it" / "looked.json").read_text()
    found: dict[str, Any] = json.loads(text.replace(str(where), "/where"))
    for name in ("environment", "environment at the start"):
        found[name] = [each for each in found[name] if not each.startswith(SERVER)]
    return found, found.pop("parent")


def test_a_forked_zygote_is_like_an_executed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forked, server = looked(tmp_path / "forked", monkeypatch)
    monkeypatch.delenv(SERVER)
    executed, agent = looked(tmp_path / "executed", monkeypatch)
    assert "tests.zygotes.server" in server and "holdfast.runtime.agent.agentd" in agent
    assert forked == executed
