"""The keeper of a launcher. Real processes stand for the actor and for the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.integrations.ray.keeper import KeptPlace, Order, Owner
from holdfast.runtime.node.process_info import alive, start_ticks
from tests.runtime.runs import until

pytestmark = pytest.mark.processes
LAUNCHER = """
import os, signal, sys, time
from pathlib import Path
here = Path(sys.argv[1])
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
(here / "pid.new").write_text(str(os.getpid()))
(here / "pid.new").rename(here / "pid")
while not asked and not (here / "end").exists():
    time.sleep(0.02)
time.sleep(1.0)  # a second request would be seen
(here / "asked").write_text(str(len(asked)))
sys.exit(75 if asked else 0)
"""


@pytest.fixture
def actor() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that stands for an actor."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def owner(process: subprocess.Popen[bytes]) -> Owner:
    """Return an actor's description of itself."""
    return Owner(process.pid, start_ticks(process.pid), "launch", "ray node", ("GPU:0",))


@pytest.fixture
def place(tmp_path: Path, actor: subprocess.Popen[bytes]) -> Iterator[KeptPlace]:
    """Yield a place whose launcher runs."""
    made = KeptPlace(tmp_path)
    made.own(owner(actor))
    made.start(Order((sys.executable, "-c", LAUNCHER, str(tmp_path)), str(tmp_path)))
    assert made.kept
    until("the launcher is up", (tmp_path / "pid").exists)
    yield made
    if made.kept:
        os.kill(pid_of(made, "keeper"), signal.SIGKILL)
    until("no process is left", lambda: not made.kept and not alive(pid_of(made, "pid")))


def pid_of(place: KeptPlace, name: str) -> int:
    """Return the process id of the keeper, or of the launcher (``pid``)."""
    return int((place.path / name).read_text())


def test_the_code_of_the_launcher_is_kept(place: KeptPlace) -> None:
    assert not place.code_file.exists()
    (place.path / "end").touch()
    until("its code", lambda: place.code is not None)
    assert place.code == 0
    until("the keeper has ended", lambda: not place.kept)


def test_a_request_is_passed_on_once(place: KeptPlace) -> None:
    place.ask()
    until("its code", lambda: place.code is not None)
    assert place.code == 75 and (place.path / "asked").read_text() == "1"


def test_a_launcher_without_an_owner_is_asked_to_leave_once(
    place: KeptPlace, actor: subprocess.Popen[bytes]
) -> None:
    actor.kill()
    actor.wait()
    until("its code", lambda: place.code is not None, 30)
    assert place.code == 75 and (place.path / "asked").read_text() == "1"


def test_an_owner_that_takes_over_changes_nothing(place: KeptPlace, actor: subprocess.Popen[bytes]) -> None:
    before = owner(actor)
    actor.kill()
    actor.wait()
    assert not before.lives
    with subprocess.Popen(["sleep", "600"]) as second:
        try:
            after = owner(second)
            assert after.succeeds(before) and after.lives
            place.own(after)
            (place.path / "end").touch()
            until("its code", lambda: place.code is not None, 30)
        finally:
            second.kill()
    assert place.code == 0


def test_a_launcher_does_not_outlive_its_keeper(place: KeptPlace) -> None:
    os.kill(pid_of(place, "keeper"), signal.SIGKILL)
    until("the launcher is gone", lambda: not alive(pid_of(place, "pid")))
    assert place.code is None and not place.kept


@pytest.mark.parametrize("other", [{"launch": "x"}, {"ray_node": "x"}, {"devices": ("GPU:1",)}])
def test_only_an_actor_of_the_same_call_node_and_devices_takes_over(other: dict[str, object]) -> None:
    first = Owner(1, 1, "launch", "ray node", ("GPU:0",))
    fields = {"pid": 2, "ticks": 2, "launch": "launch", "ray_node": "ray node", "devices": ("GPU:0",)}
    assert not Owner(**{**fields, **other}).succeeds(first)  # type: ignore[arg-type]
