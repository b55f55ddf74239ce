"""docs/parity.md stays correct: each of the 238 rows exists once, with existing proofs and the command that runs them.

``python -m tests.test_parity`` writes the column "run by" and the totals from the rows.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.proofs import functions_in, run_by

PAGE = Path(__file__).resolve().parent.parent / "docs" / "parity.md"
ROWS = {"L": 54, "P": 29, "C": 33, "R": 14, "T": 38, "G": 16, "F": 20, "W": 4, "A": 13, "I": 17}
STATES = ("works", "replaced", "not applicable", "not yet")
PROOF = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
ROW = re.compile(r"\| [A-Z]\d\d ")
TOTALS = re.compile(
    r"(\d+) work, (\d+) are replaced, (\d+) are not applicable, (\d+) (?:is|are) not there yet"
)
NOTHING = "-"


def cells_of(line: str) -> list[str]:
    """Return the cells of one row: id, capability, state, run by, text."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def rows() -> list[list[str]]:
    """Return the cells of every row."""
    return [cells_of(line) for line in PAGE.read_text().splitlines() if ROW.match(line)]


def said_of(text: str) -> str:
    """Return the text of the column "run by" for the proofs in a text."""
    ways = [run_by(path, test) for path, test in PROOF.findall(text)]
    return ", ".join(dict.fromkeys(ways)) or NOTHING


def counted() -> list[int]:
    """Return the number of rows by state."""
    return [sum(row[2] == state for row in rows()) for state in STATES]


def test_every_capability_has_one_row() -> None:
    wanted = [f"{letter}{number:02}" for letter, count in ROWS.items() for number in range(1, count + 1)]
    assert len(wanted) == 238
    assert [row[0] for row in rows()] == wanted
    assert all(len(row) == 5 and row[2] in STATES for row in rows())


def test_every_row_is_backed() -> None:
    faults = []
    for name, capability, state, _, text in rows():
        proofs = PROOF.findall(text)
        faults += [f"{name}: no {path}::{test}" for path, test in proofs if test not in functions_in(path)]
        if not capability or not text or (state == "works" and not proofs):
            faults.append(f"{name}: {state}, without a proof or a reason")
    assert not faults


def test_what_runs_a_proof_is_said() -> None:
    """The column also names the command of proofs that CI skips on two cores (switches, ``more``, frameworks)."""
    faults = [f"{row[0]}: {row[3]}, not {said}" for row in rows() if row[3] != (said := said_of(row[4]))]
    assert not faults, "python -m tests.test_parity writes the column"


@pytest.mark.parametrize(
    ("path", "test", "way"),
    [
        ("tests/cli/test_run.py", "test_a_run_to_its_end", "ci"),
        ("tests/store/test_s3_job.py", "test_a_job_in_a_bucket", "make s3"),
        ("tests/session/test_spares.py", "test_a_stopped_spare_is_not_used", "make spares"),
        ("tests/session/test_memory_tier.py", "test_a_lost_shard_comes_back", "ci"),
        ("tests/session/test_jobs.py", "test_plain_torchrun_gets_a_last_gasp", "make more"),
        ("tests/nodes/test_nodes.py", "test_two_hosts_find_each_other_and_share_one_job", "ci as root"),
        ("tests/frameworks/faces/test_megatron.py", "test_lost_rank_costs_no_step", "ci smoke"),
        (
            "tests/frameworks/mindspore/test_sliced_files.py",
            "test_slices_of_transform_checkpoints",
            "make frameworks",
        ),
    ],
)
def test_what_runs_a_test_is_read_from_its_marks(path: str, test: str, way: str) -> None:
    assert run_by(path, test) == way


def test_the_totals_are_right() -> None:
    said = TOTALS.search(PAGE.read_text())
    assert said is not None
    assert [int(number) for number in said.groups()] == counted()


def test_the_levels_name_tests_that_exist() -> None:
    proofs = PROOF.findall((PAGE.parent / "resumable-training.md").read_text())
    assert len(proofs) > 12  # at least one for each level and scheduler
    assert [f"{path}::{test}" for path, test in proofs if test not in functions_in(path)] == []


def write() -> None:
    """Write the column and the totals."""
    lines = PAGE.read_text().splitlines()
    for number, line in enumerate(lines):
        if ROW.match(line):
            cells = cells_of(line)
            lines[number] = f"| {' | '.join([*cells[:3], said_of(cells[-1]), cells[-1]])} |"
    PAGE.write_text("\n".join(lines) + "\n")
    work, replaced, never, open_ = counted()
    totals = f"{work} work, {replaced} are replaced, {never} are not applicable, {open_} are not there yet"
    PAGE.write_text(TOTALS.sub(totals, PAGE.read_text()))


if __name__ == "__main__":
    write()
