"""``holdfast drill``: train, break it, and prove that nothing was lost."""

from __future__ import annotations

import secrets
import shlex
import time
from pathlib import Path

import click
import msgspec
from rich.table import Table
from rich.text import Text

from holdfast.cli.console import Screen, table_console
from holdfast.core.fault import SEEN
from holdfast.drill.excerpt import text
from holdfast.drill.grammar import DEATHS, HANGS, PHASES, Fault, check, parse_fault
from holdfast.drill.proof import LAYOUTS, Drill, Exercise, Verdict, require_torch
from holdfast.drill.timeline import FaultReport
from holdfast.exits import Exit

WORDS = {
    "detected": "the control plane knows",
    "fenced": "the old generation is closed",
    "quiesced": "survivors left their collectives",
    "planned": "the step is decided",
    "restored": "state taken from the survivors",
    "resumed": "next step committed, full size",
}
BAR = 20
DEFAULT_STEPS = 40


@click.command(
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
)
@click.option("--fault", "faults", multiple=True, metavar="FAULT",
              help=f"KIND:rank=R|random@step=N|every=N[,phase=P], repeatable. KIND: {', '.join(DEATHS)}; hangs: "
              f"{', '.join(HANGS)}; flip (a bit of a weight, or ,of=optimizer). "
              f"Phases: {', '.join(PHASES)}, random. Default: a kill at a random step.")  # fmt: skip
@click.option("--nproc", type=click.IntRange(1, 64), default=4, show_default=True, help="Workers.")
@click.option("--size", type=click.Choice(["tiny", "small", "10m"]), default="10m", show_default=True,
              help="Model of the built-in training.")  # fmt: skip
@click.option("--layout", type=click.Choice(LAYOUTS), default="ddp", show_default=True,
              help="How the built-in training is distributed.")  # fmt: skip
@click.option("--steps", type=click.IntRange(4, 100_000), default=DEFAULT_STEPS, show_default=True,
              help="Steps of the built-in training.")  # fmt: skip
@click.option(
    "--save-every", type=click.IntRange(0), default=0, help="Let the built-in training save every N steps."
)
@click.option(
    "--seed", type=int, default=None, help="Of everything random about the faults (default: a new one)."
)
@click.option("--run-dir", default="runs", show_default=True, help="Where the drill's directory is made.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), default=None, metavar="FILE",
              help="Write the verdict as data.")  # fmt: skip
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("script", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def drill(
    faults: tuple[str, ...], nproc: int, size: str, layout: str, steps: int, save_every: int,
    seed: int | None, module: bool, run_dir: str, json_file: Path | None, script: str | None, args: tuple[str, ...],
) -> int:  # fmt: skip
    """Run a training job once undisturbed and once with faults, and compare the results bit for bit.

    Without SCRIPT: a byte-level GPT on the sources of the standard library. With SCRIPT ARGS: your own, as
    `holdfast run` would start it; it must use holdfast.session.
    """
    require_torch()
    specs = [parse_fault(text) for text in faults]
    # Now, and not after a whole run; how many steps another script has, that run will show.
    for spec in specs:
        check(spec, world_size=nproc, steps=steps if script is None else None)
    if script is None:
        exercise = Exercise.builtin(nproc=nproc, size=size, layout=layout, steps=steps, save_every=save_every)
    else:
        exercise = Exercise((*(("-m",) if module else ()), script, *args), nproc, results=False)
    chosen = secrets.randbelow(1 << 16) if seed is None else seed
    base = Path(run_dir) / time.strftime(f"drill-%Y%m%d-%H%M%S-{chosen}")
    what = script or f"{size} model, {layout}, {steps} steps"
    with Screen(marked=False) as screen:
        proof = Drill(base, exercise, chosen, lambda name, step, done: screen.status(_line(name, step, done)))
        screen.say(f"drill: {nproc} workers, {what}, seed {chosen}, logs in {base}")
        reference = proof.undisturbed()
        screen.say(f"undisturbed run: {reference.step} steps in {reference.duration_s:.1f} s")
        planned = proof.plan(specs)
        screen.say(f"now with {_several(planned)}")
        verdict = proof.disturbed("disturbed", planned)
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(verdict), indent=2) + b"\n")
    show(verdict)
    return Exit.OK if verdict.passed else Exit.FAILED


def _several(faults: list[Fault]) -> str:
    named = ", ".join(str(fault) for fault in faults[:3])
    return named if len(faults) <= 3 else f"{len(faults)} faults: {named}, ..."


def _line(name: str, step: int, done: int) -> str:
    return f"{name} run: step {step}" + (f", {done} faults injected" if done else "")


def show(verdict: Verdict) -> None:
    """Timeline and verdict."""
    console = table_console()
    for number, fault in enumerate(verdict.faults, 1):
        console.print(Text(f"\nfault {number}: {headline(fault)}", style="bold"))
        console.print(timeline(fault))
    resumed = [fault.resumed_s for fault in verdict.faults if fault.resumed_s is not None]
    console.print()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("steps lost", str(verdict.steps_lost))
    if verdict.steps_redone:
        table.add_row(
            "", f"{verdict.steps_redone} computed again, from a state that was compared or kept in memory"
        )
    same = "identical" if verdict.identical else "DIFFERENT"
    table.add_row("weights", f"{same}  {verdict.digest} undisturbed")
    table.add_row("", f"{' ' * len(same)}  {verdict.digest_disturbed or 'none'} disturbed")
    table.add_row(
        "run time", f"{verdict.undisturbed_s:.1f} s undisturbed, {verdict.disturbed_s:.1f} s disturbed"
    )
    if resumed:
        table.add_row("slowest recovery", f"{max(resumed):.2f} s from the fault to the next committed step")
    for missed in verdict.missed:
        table.add_row("not injected", missed)
    console.print(table)
    if verdict.passed:
        console.print(Text("PASSED: no committed step lost, the same bits at the end", style="bold green"))
        return
    why = verdict.reason or (f"the disturbed run ended with code {verdict.code}" if verdict.code else "")
    console.print(Text(f"FAILED{': ' if why else ''}{why}", style="bold red"))
    next_ = f"  log: {verdict.directory}.log\n  next: holdfast status {shlex.quote(str(verdict.directory))}"
    console.print(Text("\n".join(filter(None, (next_, text(verdict.last_words))))), soft_wrap=True)


def headline(fault: FaultReport) -> str:
    """What happened, in words."""
    ranks = "rank " + "+".join(map(str, fault.ranks))
    words = {
        "kill": f"kill -9 of {ranks}",
        "exception": f"unhandled exception in {ranks}",
        "exit": f"os._exit(1) in {ranks}",
        "stop": f"kill -STOP of {ranks}",
        "loop": f"endless loop in {ranks}",
        "gil": f"GIL held for ever in {ranks}",
        "deadlock": f"message that never comes, in {ranks}",
        "loader": f"stuck data loader of {ranks}",
        "flip": f"one bit of a weight of {ranks} flipped",
        "flip-optimizer": f"one bit of the optimizer's state of {ranks} flipped",
    }
    return f"{words[fault.kind]} at step {fault.step}, phase {fault.phase}"


def timeline(fault: FaultReport) -> Table:
    """The six phases, seconds since the fault, with bars."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(width=11)
    table.add_column(justify="right", width=9)
    table.add_column(width=BAR)
    table.add_column(style="dim")
    whole = fault.resumed_s or max((fault.seconds(phase) or 0.0 for phase in SEEN), default=0.0)
    before = 0.0
    for phase in SEEN:
        seconds = fault.seconds(phase)
        if seconds is None:
            table.add_row(f"  {phase}", "never", "", WORDS[phase])
            continue
        start = round(BAR * before / whole) if whole else 0
        length = max(1, round(BAR * (seconds - before) / whole)) if whole else 1
        bar = " " * min(start, BAR - 1) + "█" * min(length, BAR - min(start, BAR - 1))
        table.add_row(f"  {phase}", f"{seconds:.3f} s", Text(bar, style="cyan"), WORDS[phase])
        before = seconds
    return table
