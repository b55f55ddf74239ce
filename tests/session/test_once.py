"""``holdfast.once``: a replaced rank gets the value that the lost process had made."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.errors import UsageError
from holdfast.session.once import encoded
from tests.session.launch import run_job

JOB = str(Path(__file__).with_name("once_job.py"))


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize(
    ("flags", "lives"),
    [
        ((), [1, 2]),
        pytest.param(("--on-fault", "restart"), [2, 2], marks=pytest.mark.more),
        pytest.param(("--spares", "1"), [1, 2], marks=pytest.mark.more),
    ],
    ids=["replaced", "restarted", "spare"],
)
def test_every_process_of_a_rank_has_the_value_of_the_first(
    tmp_path: Path, flags: tuple[str, ...], lives: list[int]
) -> None:
    done = run_job(tmp_path, 2, *flags, JOB, str(tmp_path))
    assert done.returncode == 0, done.stdout
    asked = [[line.split() for line in (tmp_path / f"asked-{r}").read_text().splitlines()] for r in (0, 1)]
    values = [{value for _, *both in of for value in both} for of in asked]
    assert [len({pid for pid, *_ in of}) for of in asked] == lives
    assert [len(of) for of in values] == [1, 1] and values[0] != values[1]


def test_without_a_launcher_it_is_made_each_time() -> None:
    numbers = iter(range(9))
    assert [holdfast.once("number", lambda: next(numbers)) for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("name", ["", "n" * 101, "two\nlines", "\ud800"])
def test_a_name_that_cannot_be_kept_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="no name that can be kept"):
        holdfast.once(name, dict)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (Path("logs"), "an object of type PosixPath cannot be kept"),
        ({"a": [1, float("nan")]}, "the number nan cannot be kept"),
        ({"a": {2: 1}}, "the key 2 cannot be kept"),
        ((1, 2), "an object of type tuple cannot be kept"),
        ("x" * 1000, "1002 characters of JSON, more than 1000"),
    ],
)
def test_a_value_that_would_come_back_as_another_is_refused(made: object, told: str) -> None:
    with pytest.raises(UsageError, match=f"'it'.: {told}"):
        encoded("it", made)


def test_a_child_process_of_a_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_MEMBER_ID", "1")
    with pytest.raises(UsageError, match="a child process of a worker asks"):
        holdfast.once("new", dict)
