"""What ``docs/commands.md`` promises to scripts and shells."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from holdfast.cli import doctor, gc, listing, postmortem, stacks, view
from holdfast.cli.main import COMMANDS
from holdfast.drill import proof, timeline
from holdfast.sim import forecast, summary
from holdfast.store import root, tools, validity
from tests.cli.command import Run

TEXT = (Path(__file__).resolve().parents[2] / "docs/commands.md").read_text()
DOCUMENTED: dict[str, type[msgspec.Struct]] = {
    "`status`": view.RunView,
    "in `ranks`": view.RankView,
    "in `hosts`": view.HostView,
    "in `faults`": view.FaultView,
    "in `spares`": view.SpareView,
    "`ls`": listing.Listed,
    "`gc`": gc.Collected,
    "`report`": postmortem.Report,
    "in `timeline`": postmortem.PhaseTime,
    "`stacks`": stacks.RankStacks,
    "`doctor`": doctor.Finding,
    "`drill`": proof.Verdict,
    "in its `faults`": timeline.FaultReport,
    "`sim`": summary.Summary,
    "`sim --forecast`": forecast.Forecast,
    "`ckpt ls`, `ckpt verify`": validity.Validity,
    "`ckpt holders`": tools.Holding,
    "`ckpt prune`": root.Pruned,
}


def test_the_keys_of_json_are_documented() -> None:
    rows = {
        name: re.findall(r"`(\w+)`", keys)
        for name, keys in re.findall(r"^\| (.+?) \| .+? \| (`.+) \|$", TEXT, re.M)
    }
    assert rows == {
        name: [field.encode_name for field in msgspec.structs.fields(kind)]
        for name, kind in DOCUMENTED.items()
    }
    assert all(f"`{state}`" in TEXT for state in get_args(view.State))


@pytest.mark.parametrize("shell", re.findall(r"_HOLDFAST_COMPLETE=(\w+)_source", TEXT))
def test_completion(holdfast: Run, shell: str) -> None:
    made = holdfast(env={"_HOLDFAST_COMPLETE": f"{shell}_source"})
    assert made.returncode == 0 and f"_HOLDFAST_COMPLETE={shell}_complete" in made.stdout
    asked = holdfast(env={"_HOLDFAST_COMPLETE": "zsh_complete", "COMP_WORDS": "holdfast ", "COMP_CWORD": "1"})
    assert set(COMMANDS) <= set(asked.stdout.split("\n"))
