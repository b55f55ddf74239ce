"""The installed torch: its version, its defects, and the verdict of its self-test. Nothing here imports torch.

Theory. Recovery in place uses private names of torch, and an untested version may have changed them. A refusal of such
a version would lock out every new user on the day of a release. So a torch that is newer than the tested versions is
tried once. The self-test (``drill/selftest.py``) runs a job of two ranks that loses one of them. The job must replace
that rank in place, and must end with the same bits as an undisturbed run. The verdict is kept for this build of torch
and of Holdfast. If the self-test fails, Holdfast does not replace torch's own process groups, and all workers start
again after a fault.

A torch that cannot work is refused before it is loaded, because the loader's own error names a symbol and not the
cause.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TypeAlias

import msgspec

from holdfast.errors import FrameworkError
from holdfast.package import DIRECTORY
from holdfast.runtime.node.rundir import write_private
from holdfast.version import VERSION

Version: TypeAlias = tuple[int, int]

TESTED_LEAST: Version = (2, 12)
TESTED_MOST: Version = (2, 15)
TESTED = "2.12 to 2.15"
"""The versions of torch with which ``make torches`` tests Holdfast."""

VARIABLE = "HOLDFAST_TORCH"
"""An environment variable of workers. Its value is ``tried``, or the reason why torch's own process groups are kept."""

TRIED = "tried"
SELF_TEST = "holdfast.drill.selftest"
SELF_TEST_S = 120.0
LAUNCHERS = ("HOLDFAST_", "PET_", "TORCHELASTIC_")
PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
REASON_LENGTH_MAX = 300
INSTALL = "pip install 'holdfast[torch]'"


class TorchBuild(NamedTuple):
    """The installed torch. ``text`` is its version; ``identity`` is a digest that differs for another build."""

    text: str
    identity: str

    @property
    def version(self) -> Version:
        """The major and minor number of the version."""
        return version_of(self.text)

    @property
    def is_newer(self) -> bool:
        """True if this torch is newer than every tested version."""
        return self.version > TESTED_MOST


class SelfTestVerdict(msgspec.Struct, frozen=True):
    """The result of the self-test of one build of torch. ``reason`` is the failure; empty if the test has passed."""

    torch: str
    reason: str


def version_of(text: str) -> Version:
    """Return (major, minor) of a version: (2, 15) for ``2.15.0+cu132``.

    Return (0, 0) if ``text`` begins with no version.
    """
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def torch_build() -> TorchBuild | None:
    """Return the torch that an import would find; None if there is none.

    Raises:
        FrameworkError: torch is older than the oldest tested version, or its files and its installation record differ
            in version.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None  # another package of this name, or one without files: its import shows what it is
    found = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    if found is None:
        return None
    installed, recorded = found[1], _recorded()
    if recorded and recorded.partition("+")[0] != installed.partition("+")[0]:
        raise FrameworkError(
            f"torch is installed by halves: its files are of {installed}, the installation records {recorded}",
            hint=f"pip install --force-reinstall --no-deps torch=={recorded}",
        )
    if version_of(installed) < TESTED_LEAST:
        raise FrameworkError(f"torch {installed} is too old: Holdfast runs with {TESTED}", hint=INSTALL)
    return TorchBuild(installed, hashlib.blake2b(text.encode(), digest_size=16).hexdigest())


def _recorded() -> str:
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and rarely needed

    try:
        return version("torch")
    except PackageNotFoundError:  # found by PYTHONPATH, or built in its directory
        return ""


def cannot_load(error: Exception) -> FrameworkError:
    """Return the error to raise after a failed import of torch.

    Its hint is the command that repairs the installation.
    """
    if isinstance(error, FrameworkError):
        return error
    said = str(error).strip().splitlines()
    return FrameworkError(
        f"torch cannot be loaded: {said[0] if said else type(error).__name__}"[:REASON_LENGTH_MAX],
        hint="its libraries are incomplete: pip install --force-reinstall torch, then holdfast doctor",
    )


def check_loaded(torch: ModuleType) -> None:
    """Raise an error if the loaded torch has no process groups. Raises: FrameworkError."""
    if not torch.distributed.is_available():
        raise FrameworkError(
            f"torch {torch.__version__} was built without torch.distributed",
            hint=f"install a build with it: {INSTALL}",
        )


def all_restart(torch: str, reason: str) -> str:
    """Return the message that Holdfast does not replace torch's own process groups. ``reason`` is the cause."""
    return (
        f"torch {torch}: {reason}: all workers start again after a fault, none is replaced in place "
        f"(tested: torch {TESTED})"
    )


def why_untouched() -> str:
    """Return why Holdfast does not replace torch's own process groups in this process; empty if it replaces them.

    The launcher sets the reason in an environment variable. Without this variable, the self-test decides.
    """
    told = os.environ.get(VARIABLE)
    if told is not None:
        return "" if told == TRIED else told
    build = torch_build()
    return try_out(build).reason if build is not None and build.is_newer else ""


@functools.cache
def try_out(build: TorchBuild) -> SelfTestVerdict:
    """Return the recorded verdict on a build of torch. Without a record, run the self-test (a few seconds)."""
    kept = _kept_at(build)
    try:
        verdict = msgspec.json.decode(kept.read_bytes(), type=SelfTestVerdict)
    except (OSError, msgspec.MsgspecError):
        pass  # not tried yet, or the file is damaged
    else:
        return verdict
    verdict = SelfTestVerdict(build.text, _self_test())
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(kept, msgspec.json.encode(verdict))
    except OSError:
        pass  # the home directory is not writable: it is tried again in the next process
    return verdict


def _kept_at(build: TorchBuild) -> Path:
    """Return the file with the result of the self-test for this build of torch and Holdfast and this Python version."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    ours = hashlib.blake2b(digest_size=16)
    for file in sorted(DIRECTORY.glob("frameworks/torch/**/*.py")):
        ours.update(file.read_bytes())
    mark = f"{build.identity}-{ours.hexdigest()}-{VERSION}-{sys.version_info[0]}.{sys.version_info[1]}"
    return cache / "holdfast" / "torch" / f"{hashlib.blake2b(mark.encode(), digest_size=16).hexdigest()}.json"


def _self_test() -> str:
    """Run the self-test, and return its failure as text; empty if it has passed."""
    command = [sys.executable, "-m", SELF_TEST]
    # Variables that a launcher has set for this process are not meant for another job.
    env = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS) and k not in PLACES}
    with tempfile.TemporaryDirectory(prefix="holdfast-selftest-") as place:
        try:
            done = subprocess.run(
                command, cwd=place, env={**env, VARIABLE: TRIED}, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=SELF_TEST_S, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)[:REASON_LENGTH_MAX]
    if done.returncode == 0:
        return ""
    said = [line for line in done.stdout.splitlines() if line] or done.stderr.strip().splitlines()
    return (said[-1] if said else f"exit code {done.returncode}")[:REASON_LENGTH_MAX]
