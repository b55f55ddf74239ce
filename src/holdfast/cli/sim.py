"""``holdfast sim``: the protocol against random faults on a virtual clock, and exhaustively for a few ranks."""

from __future__ import annotations

import sys

import click
import msgspec

from holdfast.exits import Exit
from holdfast.sim.summary import summarize


@click.command()
@click.option("--ranks", default=8, show_default=True, type=click.IntRange(2, 4096), help="World size.")
@click.option("--seeds", default=100, show_default=True, type=click.IntRange(1), help="Runs, one per seed.")
@click.option("--first-seed", default=0, show_default=True, help="Seed of the first run.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def sim(ranks: int, seeds: int, first_seed: int, as_json: bool) -> None:
    """Run the real controller and agent machines against random faults, with every invariant checked.

    A run is a function of its seed: a violation names the seed that shows it again.
    """
    result = summarize(ranks, range(first_seed, first_seed + seeds))
    if as_json:
        click.echo(msgspec.json.encode(result))
    else:
        click.echo(
            f"{result.runs} runs of {ranks} ranks: {result.events} events in {result.virtual_s:.0f} virtual seconds, "
            f"{result.recoveries} faults recovered"
        )
        click.echo(
            f"ranks in doubt: {result.in_doubt_forward} decisions forward, {result.in_doubt_back} back"
        )
        click.echo(f"exhaustive search of one step with two deaths: {result.searched_states} states")
        click.echo(f"exhaustive search of two elections of three agents: {result.election_states} states")
        for violation in result.violations:
            click.echo(f"VIOLATION {violation}")
        click.echo("no invariant was broken" if not result.violations else "please report the lines above")
    if result.violations:
        sys.exit(int(Exit.INTERNAL))
