"""Runs of the jobs that change values outside of their blocks (``changes.py``), each to its end."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.frameworks.launched import Launched

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
WORLD = 2


class Ends:
    """The final values of a framework's runs. Undisturbed runs are started once."""

    def __init__(self, framework: str, folder: Path) -> None:
        self._framework = framework
        self._folder = folder
        self._known: dict[str, list[str]] = {}

    def calm(self, way: str) -> list[str]:
        """Return the final values of the undisturbed run, which are equal on all ranks."""
        if way not in self._known:
            self._known[way], _ = self.of(self._folder / way, way)
            assert len(set(self._known[way])) == 1
        return self._known[way]

    def check_killed(self, folder: Path, way: str, kill: str, flags: tuple[str, ...] = ()) -> None:
        """Check that one fault costs no step, and that the ranks end as in the undisturbed run."""
        found, output = self.of(folder, way, kill, flags=flags)
        assert found == self.calm(way), output
        assert "1 fault, 0 steps lost" in output, output

    def check_undisturbed_saves(self, folder: Path) -> None:
        """Run with periodic saves, then remove the final one."""
        found, output = self.of(folder, "behind", "", "save")
        assert found == self.calm("behind"), output
        for final in (folder / "ckpts").glob("step-00000009*"):
            shutil.rmtree(final)

    def check_next_start(self, folder: Path) -> None:
        """Check that the same command continues after the sixth step, including the changes that follow its block."""
        found, output = self.of(folder, "behind", name="u")
        assert found == self.calm("behind") and "resumed at step 6 " in output, output

    def of(
        self, folder: Path, *arguments: str, flags: tuple[str, ...] = (), code: int = 0, name: str = "t"
    ) -> tuple[list[str], str]:
        """Return the final values of the last attempt of one run, and its output."""
        env = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        job = str(HERE / self._framework / "changes_job.py")
        run_flags = ("--framework", self._framework, "--nproc-per-node", str(WORLD), *flags)
        with Launched(folder, *run_flags, job, *arguments, env=env, name=name) as run:
            assert run.wait() == code, run.output
            found = run.said(r"(?m)^end (.*)$")
            assert len(found) == (0 if code else WORLD), run.output
            return found, run.output
