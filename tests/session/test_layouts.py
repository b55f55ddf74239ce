"""Ranks that hold different tensors, from different steps on: they still save at once, and get back what they held."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.store.manage.checkpoint_root import Root
from tests.session.launch import run_job
from tests.session.layout_job import STEPS
from tests.session.test_jobs import events

pytestmark = [pytest.mark.torch, pytest.mark.processes]
JOB = str(Path(__file__).with_name("layout_job.py"))
RANKS = 3
HALF_KNOWN = (4, 9)


def run(where: Path, *arguments: str, flags: tuple[str, ...] = ()) -> str:
    """Run one job in ``where``. Return its output."""
    result = where / "result"
    result.mkdir(parents=True, exist_ok=True)
    done = run_job(where, RANKS, *flags, JOB, "--result", str(result), *arguments)
    assert done.returncode == 0, done.stdout
    return done.stdout


def ended(where: Path) -> list[str]:
    """Return what each rank held at the end."""
    return [(where / "result" / f"ended-{rank}").read_text() for rank in range(RANKS)]


def sealed(where: Path) -> list[int]:
    """Return the steps of complete checkpoints, from the controller's log. Fail if a share was not written."""
    failed = [event["data"] for event in events(where, "saved") if event["data"]["error"]]
    assert not failed
    return sorted(event["data"]["step"] for event in events(where, "sealed"))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Return what each rank holds at the end of an undisturbed run."""

    @functools.cache
    def ends(*arguments: str) -> list[str]:
        where = tmp_path_factory.mktemp("calm")
        run(where, *arguments)
        return ended(where)

    return ends


@pytest.mark.more
@pytest.mark.parametrize("verify", ["1", pytest.param("0", marks=pytest.mark.more)])
def test_each_step_is_saved_whatever_comes_where(
    tmp_path: Path, calm: Callable[..., list[str]], verify: str
) -> None:
    asked = [word for step in range(STEPS - 1) for word in ("--save", str(step))]
    run(tmp_path, *asked, flags=("--verify-every", verify))
    assert ended(tmp_path) == calm()
    steps = sealed(tmp_path)
    assert len(steps) > STEPS / 2 and steps[-1] == STEPS, "one that finds the one before in flight is put off"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of checkpoints from moments at which some ranks hold what others lack."""
    where = tmp_path_factory.mktemp("saved")
    run(where, *(word for step in HALF_KNOWN for word in ("--save", str(step - 1))))
    return where / "ckpt"


@pytest.mark.parametrize(
    "step", [HALF_KNOWN[0], *(pytest.param(s, marks=pytest.mark.more) for s in HALF_KNOWN[1:])]
)
def test_each_rank_gets_back_what_it_held(
    tmp_path: Path, calm: Callable[..., list[str]], saved: Path, step: int
) -> None:
    shutil.copytree(saved, tmp_path / "ckpt")
    for v in Root(tmp_path / "ckpt").list():
        if v.step != step:
            shutil.rmtree(str(v.path))
    run(tmp_path)
    opened = sorted(path.name for path in (tmp_path / "result").glob("opened-*"))
    assert opened == [f"opened-{rank}-{step}" for rank in range(RANKS)]
    assert ended(tmp_path) == calm()


@pytest.mark.more
@pytest.mark.parametrize(
    ("victim", "step", "verify", "arguments"),
    [
        pytest.param(
            1, 7, "50", ("--alike",), marks=pytest.mark.more
        ),  # the victim already has the tensors of the others
        (2, 6, "0", ("--alike",)),  # the victim has the tensor, and one other rank does not
        pytest.param(2, 5, "0", ("--alike", "--doubt"), marks=pytest.mark.more),
        pytest.param(1, 6, "0", (), marks=pytest.mark.more),
        pytest.param(2, 8, "50", ("--doubt",), marks=pytest.mark.more),
    ],
)
def test_a_rank_that_is_killed_before_it_could_vote_on_what_changed(
    tmp_path: Path,
    calm: Callable[..., list[str]],
    victim: int,
    step: int,
    verify: str,
    arguments: tuple[str, ...],
) -> None:
    flags = ("--verify-every", verify, "--memory-every", "1")
    run(tmp_path, *arguments, "--die", f"{victim}:{step}", "--save", str(STEPS - 3), flags=flags)
    assert (tmp_path / "result" / "died").exists()
    assert ended(tmp_path) == calm(*(word for word in arguments if word == "--alike"))
    assert len(events(tmp_path, "recovered")) == 1
    doubts = sum(event["data"]["in_doubt"] for event in events(tmp_path, "planned"))
    assert doubts or "--doubt" not in arguments
    assert sealed(tmp_path) == [STEPS - 2, STEPS]
