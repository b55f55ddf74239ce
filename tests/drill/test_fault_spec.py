"""The grammar of faults: what it accepts, what it refuses by name, and random choices that depend only on the seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli.main import answer
from holdfast.drill.fault_spec import MOMENT, STEP_PHASES, InjectedFault, expand, parse_fault
from holdfast.errors import UsageError


@pytest.mark.parametrize(
    ("text", "part"), [("kill:rank=9@step=3", "ranks 0 to 1"), ("kill:rank=1@step=99", "at step 8")]
)
def test_what_can_never_come_is_refused_before_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, part: str
) -> None:
    flags = ["--nproc", "2", "--steps", "8", "--run-dir", str(tmp_path)]
    assert answer(["drill", *flags, "--fault", text]) == 2
    assert part in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kill:rank=2@step=20", [InjectedFault("kill", (2,), 20, MOMENT)]),
        ("kill:rank=1@step=20,phase=vote", [InjectedFault("kill", (1,), 20, "vote")]),
        ("exit:rank=0@step=3,phase=save", [InjectedFault("exit", (0,), 3, "save")]),
        ("kill:rank=1+3@step=5,phase=update", [InjectedFault("kill", (1, 3), 5, "update")]),
        ("stop:rank=1+3@step=5", [InjectedFault("stop", (1, 3), 5, MOMENT)]),
        ("gil:rank=1@step=5,phase=update", [InjectedFault("gil", (1,), 5, "update")]),
        ("deadlock:rank=1@step=5", [InjectedFault("deadlock", (1,), 5, "forward")]),
        ("loader:rank=1@step=5", [InjectedFault("loader", (1,), 5, "loading")]),
        (
            "kill:rank=1@every=15",
            [InjectedFault("kill", (1,), 15, MOMENT), InjectedFault("kill", (1,), 30, MOMENT)],
        ),
    ],
)
def test_reads_what_the_documentation_shows(text: str, expected: list[InjectedFault]) -> None:
    assert expand([parse_fault(text)], world_size=4, steps=40, seed=0) == expected


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("melt:rank=1@step=2", "melt"),
        ("kill:rank=1", "step=N or every=N"),
        ("kill:rank=1@step=2@every=3", "step=N or every=N"),
        ("kill:rank=1@every=0", "every=0"),
        ("kill:rank=x@step=2", "'x'"),
        ("kill:rank=1@step=-2", "'-2'"),
        ("kill:rank=1@step=2,phase=lunch", "lunch"),
        ("kill:rank=1@step=2@step=3", "step=3"),
        ("kill:rank=1+1@step=2", "twice"),
        ("exit:rank=1+2@step=2", "several"),
        ("loop:rank=1+2@step=2", "several"),
        ("loader:rank=1@step=2,phase=update", "no phase"),
        ("kill", "cannot read ''"),
    ],
)
def test_names_what_is_wrong(text: str, part: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_fault(text)
    assert part in caught.value.message and caught.value.hint


@pytest.mark.parametrize("text", ["kill:rank=4@step=2", "kill:rank=1@step=40"])
def test_what_the_run_does_not_have(text: str) -> None:
    with pytest.raises(UsageError):
        expand([parse_fault(text)], world_size=4, steps=40, seed=0)


def test_a_seed_decides_what_is_random() -> None:
    specs = [
        parse_fault("kill:rank=random@every=3,phase=random"),
        parse_fault("exception:rank=random@step=4"),
    ]
    first = expand(specs, world_size=4, steps=100, seed=7)
    assert first == expand(specs, world_size=4, steps=100, seed=7)
    assert first != expand(specs, world_size=4, steps=100, seed=8)
    assert {fault.ranks[0] for fault in first} == {0, 1, 2, 3}
    assert {fault.phase for fault in first} == set(STEP_PHASES)
    assert [fault.step for fault in first] == sorted(fault.step for fault in first)


def test_a_fault_reads_back_as_it_prints() -> None:
    for fault in (
        InjectedFault("kill", (1, 3), 5, "update"),
        InjectedFault("exit", (0,), 9, "save"),
        InjectedFault("kill", (2,), 7, MOMENT),
    ):
        assert expand([parse_fault(str(fault))], world_size=4, steps=40, seed=0) == [fault]
