"""The command ``holdfast sim``: simulated runs with faults, an exhaustive search of the protocol, goodput forecasts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from holdfast.cli.screen.escaping import echo, echo_json
from holdfast.cli.start.finite_number import FiniteNumber
from holdfast.errors import UsageError
from holdfast.exit_codes import Exit
from holdfast.sim.faults import SimFault
from holdfast.sim.goodput import Cause, Forecast, default_causes, forecast
from holdfast.sim.invariants import Violation
from holdfast.sim.summary import faults_of, summarize
from holdfast.sim.world import run_sim
from holdfast.text import plural

EXAMPLE = '[{"kind": "kill", "at_s": 0.8, "rank": 3, "state": "voting"}]'
CAUSES_EXAMPLE = '[{"name": "worker", "rank_hours": 50000, "stop_s": 30, "redo_s": 0}]'

T = TypeVar("T")


@click.command()
@click.option("--ranks", default=8, show_default=True, type=click.IntRange(2, 65536), help="World size.")
@click.option("--seeds", default=100, show_default=True, type=click.IntRange(1), help="Runs, one per seed.")
@click.option("--first-seed", default=0, show_default=True, help="Seed of the first run.")
@click.option("--seed", type=int, help="One run with this seed: the line that shows a violation again.")
@click.option("--faults", "faults_file", type=Path, help=f"JSON of the faults of that run, e.g. {EXAMPLE}")
@click.option("--forecast", "foretell", is_flag=True, help="Goodput of a fleet of --ranks, by cause of loss.")
@click.option(
    "--rank-hours",
    type=FiniteNumber(min=0, min_open=True),
    default=50_000.0,
    show_default=True,
    help="Forecast: rank-hours between faults.",
)
@click.option(
    "--step-s", type=FiniteNumber(min=0), default=10.0, show_default=True, help="Forecast: seconds of a step."
)
@click.option(
    "--stop-s",
    type=FiniteNumber(min=0),
    default=30.0,
    show_default=True,
    help="Forecast: seconds that a lost worker stops the job.",
)
@click.option(
    "--causes", "causes_file", type=Path, help="Forecast: JSON list of name, rank_hours, stop_s, redo_s."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def sim(
    ranks: int, seeds: int, first_seed: int, seed: int | None, faults_file: Path | None, foretell: bool,
    rank_hours: float, step_s: float, stop_s: float, causes_file: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Simulate the real controller and agents under random faults, and check every invariant.

    A run is a function of its seed, so the seed that a violation names shows the violation again.
    """
    if foretell:
        causes = default_causes(rank_hours, step_s, stop_s)
        if causes_file is not None:
            causes = _read(causes_file, tuple[Cause, ...], CAUSES_EXAMPLE)
        _tell(forecast(ranks, causes), as_json)
    elif seed is not None or faults_file is not None:
        faults = None if faults_file is None else _read(faults_file, tuple[SimFault, ...], EXAMPLE)
        _one(ranks, seed or 0, faults, as_json)
    else:
        _many(ranks, range(first_seed, first_seed + seeds), as_json)


def _read(path: Path, kind: type[T], example: str) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="holdfast sim --help") from error
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path}: {error}", hint=f"for example {example}") from error


def _one(ranks: int, seed: int, faults: tuple[SimFault, ...] | None, as_json: bool) -> None:
    chosen = faults_of(ranks, seed) if faults is None else faults
    try:
        result = run_sim(ranks, seed, chosen)
    except Violation as violation:
        echo(f"VIOLATION seed {seed}: {violation}")
        sys.exit(int(Exit.INTERNAL))
    if as_json:
        echo_json(msgspec.json.encode(result))
        return
    echo(
        f"{plural(ranks, 'rank')}, seed {seed}: {plural(len(chosen), 'fault')}, "
        f"{result.events} events, {result.time_s:.2f} virtual s"
    )
    for record in result.records:
        if record.kind in ("detected", "verdict", "recovered", "run_ended"):
            told = ", ".join(
                f"{key} {value}" for key, value in record.data.items() if value not in ("", None)
            )
            echo(f"  {record.kind}: {told}"[:200])
    echo(f"digest {result.digest}; no invariant was broken")


def _many(ranks: int, seeds: range, as_json: bool) -> None:
    result = summarize(ranks, seeds)
    if as_json:
        echo_json(msgspec.json.encode(result))
    else:
        echo(
            f"{plural(result.runs, 'run')} of {plural(ranks, 'rank')}: "
            f"{result.events} events in {result.virtual_s:.0f} virtual seconds, "
            f"{plural(result.recoveries, 'fault')} recovered"
        )
        echo(
            f"ranks that had not received a vote: {plural(result.in_doubt_forward, 'decision')} forward, "
            f"{result.in_doubt_back} back"
        )
        echo(f"exhaustive search of one step with two deaths: {result.searched_states} states")
        echo(f"exhaustive search of two elections of three agents: {result.election_states} states")
        for violation in result.violations:
            echo(f"VIOLATION {violation}")
        echo("no invariant was broken" if not result.violations else "please report the lines above")
    if result.violations:
        sys.exit(int(Exit.INTERNAL))


def _tell(result: Forecast, as_json: bool) -> None:
    if as_json:
        echo_json(msgspec.json.encode(result))
        return
    echo(
        f"{plural(result.ranks, 'rank')}: goodput {100 * result.goodput:.2f} % (expected; the causes are assumptions)"
    )
    for loss in result.losses:
        cost = f"{loss.each_s:8.1f} s each  {100 * loss.share:6.3f} % of the time"
        echo(f"  {loss.name:16} {loss.per_day:8.2f} per day  {cost}")
