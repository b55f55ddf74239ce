"""The command ``holdfast drill``, which trains with and without injected faults and compares the results."""

from __future__ import annotations

import secrets
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click
import msgspec
from rich.text import Text

from holdfast.cli.screen.console import Screen, table_console
from holdfast.cli.start.run_config import find_target
from holdfast.cli.start.script_arguments import without_separator
from holdfast.core.job.fault import SEEN
from holdfast.drill.exercise import LAYOUTS, Drill, DrillVerdict, Exercise, require_torch
from holdfast.drill.failure_excerpt import text
from holdfast.drill.fault_spec import DEATHS, HANGS, PHASES, InjectedFault, check, parse_fault
from holdfast.drill.timeline import InjectedFaultReport
from holdfast.errors import UsageError
from holdfast.exit_codes import Exit
from holdfast.text import plural

WORDS = {
    "detected": "the control plane knows",
    "fenced": "the old groups are closed",
    "quiesced": "survivors left their collectives",
    "planned": "the step is decided",
    "restored": "state taken from the survivors",
    "resumed": "next step committed, full size",
}
RESTORED = {
    "replace_from_memory": "state taken from shared memory",
    "restart_from_memory": "state taken from shared memory",
    "restart_last_gasp": "saved by the survivors, loaded",
    "restart_checkpoint": "state of a checkpoint loaded",
    "restart_fresh": "all began again at step 0",
}
"""Text about the origin of the state, by action (rung) of a recovery. With other actions, the survivors gave it."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BAR = 20
DEFAULT_STEPS = 40


@click.command(
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
)
@click.option("--fault", "faults", multiple=True, metavar="FAULT",
              help=f"KIND:rank=R|random@step=N|every=N[,phase=P], repeatable. KIND: {', '.join(DEATHS)}; hangs: "
              f"{', '.join(HANGS)}; flip (a bit of a weight, or ,of=optimizer). "
              f"Phases: {', '.join(PHASES)}, random. ready: in the code after a block; epoch: in the code after an "
              "epoch. Default: a kill at a random step; with SCRIPT a second one in the phase ready.")  # fmt: skip
@click.option("--nproc", "--nproc-per-node", "--nproc_per_node", type=click.IntRange(1, 64), default=4,
              show_default=True, help="Workers.")  # fmt: skip
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
@click.option("--run-dir", "--run_dir", default="runs", show_default=True,
              help="Where the drill's directory is made.")  # fmt: skip
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), default=None, metavar="FILE",
              help="Write the verdict as data.")  # fmt: skip
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("script", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED, callback=without_separator)
def drill(
    faults: tuple[str, ...], nproc: int, size: str, layout: str, steps: int, save_every: int,
    seed: int | None, module: bool, run_dir: str, json_file: Path | None, script: str | None, args: tuple[str, ...],
) -> int:  # fmt: skip
    """Run a training job once undisturbed and once with faults, and compare the results bit for bit.

    Without SCRIPT, the job trains a byte-level GPT on the sources of the standard library. With SCRIPT ARGS, the job is
    your own script, started as `holdfast run` would start it. The script must use holdfast.session.
    """
    require_torch()
    if json_file is not None:
        _writable(json_file)
    specs = [parse_fault(text) for text in faults]
    # Checked before the first run. The number of steps of a user's script is known only after that run.
    for spec in specs:
        check(spec, world_size=nproc, steps=steps if script is None else None)
    if script is None:
        exercise = Exercise.builtin(nproc=nproc, size=size, layout=layout, steps=steps, save_every=save_every)
    else:
        find_target("module" if module else "script", script)
        exercise = Exercise((*(("-m",) if module else ()), script, *args), nproc, results=False)
    chosen = secrets.randbelow(1 << 16) if seed is None else seed
    base = Path(run_dir) / time.strftime(f"drill-%Y%m%d-%H%M%S-{chosen}")
    what = script or f"{size} model, {layout}, {plural(steps, 'step')}"
    try:
        with Screen(marked=False) as screen, _interruptible(screen):
            proof = Drill(
                base, exercise, chosen, lambda name, step, done: screen.status(_line(name, step, done))
            )
            screen.say(f"drill: {plural(nproc, 'worker')}, {what}, seed {chosen}, logs in {base}")
            reference = proof.undisturbed()
            screen.say(f"undisturbed run: {plural(reference.step, 'step')} in {reference.duration_s:.1f} s")
            planned = proof.plan(specs)
            screen.say(f"now with {_several(planned)}")
            verdict = proof.disturbed("disturbed", planned)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(verdict), indent=2) + b"\n")
    show(verdict)
    return Exit.OK if verdict.passed else Exit.FAILED


@contextmanager
def _interruptible(screen: Screen) -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a drill like Ctrl-C. Otherwise the job would continue in its own process session.

    All signals after the first one are ignored, so that they do not interrupt the end of the job.
    """

    def stop(_number: int, _frame: FrameType | None) -> None:
        for each in handled:
            # With SIG_IGN, Python would print an error for a signal that has arrived but was not yet handled.
            signal.signal(each, lambda _number, _frame: None)
        raise KeyboardInterrupt

    handled = {each: signal.getsignal(each) for each in SIGNALS if signal.getsignal(each) != signal.SIG_IGN}
    for each in handled:
        signal.signal(each, stop)
    try:
        yield
    except KeyboardInterrupt:
        screen.say("interrupted: the run was ended")
        raise
    finally:
        for each, before in handled.items():
            signal.signal(each, before)


def _writable(file: Path) -> None:
    """Test, before the runs, whether the file for the verdict can be written. Raises: UsageError."""
    existed = file.exists()
    try:
        with file.open("ab"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise UsageError(
            f"--json {file}: {error.strerror}", hint="name a file in a directory that exists"
        ) from error


def _several(faults: list[InjectedFault]) -> str:
    named = ", ".join(str(fault) for fault in faults[:3])
    return named if len(faults) <= 3 else f"{len(faults)} faults: {named}, ..."


def _line(name: str, step: int, done: int) -> str:
    return f"{name} run: step {step}" + (f", {done} fault{'s' * (done != 1)} injected" if done else "")


def show(verdict: DrillVerdict) -> None:
    """Print the timeline of each fault and the verdict of a drill.

    Lines are not wrapped here but by the terminal, so that no digest is cut.
    """
    console = table_console()
    for number, fault in enumerate(verdict.faults, 1):
        console.print(Text(f"\nfault {number}: {headline(fault)}", style="bold"), soft_wrap=True)
        console.print(timeline(fault), soft_wrap=True)
    console.print(
        "\n" + "\n".join(f"{name:<16}  {value}" for name, value in findings(verdict)), soft_wrap=True
    )
    if verdict.passed:
        console.print(Text("PASSED: no committed step lost, the same bits at the end", style="bold green"))
        return
    why = verdict.reason or (f"the disturbed run ended with code {verdict.code}" if verdict.code else "")
    console.print(Text(f"FAILED{': ' if why else ''}{why}", style="bold red"), soft_wrap=True)
    next_ = f"  log: {verdict.directory}.log\n  next: holdfast status {shlex.quote(str(verdict.directory))}"
    console.print(Text("\n".join(filter(None, (next_, text(verdict.last_words))))), soft_wrap=True)


def findings(verdict: DrillVerdict) -> Iterator[tuple[str, str]]:
    """Yield (name, value) as text for each result of a drill: lost steps, digests, durations, faults not injected."""
    yield "steps lost", str(verdict.steps_lost)
    if verdict.steps_redone:
        yield "", f"{verdict.steps_redone} computed again, from a compared state or one in memory"
    same = "identical" if verdict.identical else "DIFFERENT"
    yield "weights", f"{same}  {verdict.digest} undisturbed"
    yield "", f"{' ' * len(same)}  {verdict.digest_disturbed or 'none'} disturbed"
    yield "run time", f"{verdict.undisturbed_s:.1f} s undisturbed, {verdict.disturbed_s:.1f} s disturbed"
    resumed = [fault.resumed_s for fault in verdict.faults if fault.resumed_s is not None]
    if resumed:
        yield "slowest recovery", f"{max(resumed):.2f} s from the fault to the next committed step"
    for missed in verdict.missed:
        yield "not injected", missed


def headline(fault: InjectedFaultReport) -> str:
    """Return a text about an injected fault: ``kill -9 of rank 1 at step 14, phase update``."""
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


def timeline(fault: InjectedFaultReport) -> Text:
    """Return one line for each of the six phases of a recovery: its end in seconds since the fault, a bar, a text."""
    words = {**WORDS, "restored": RESTORED.get(fault.action, WORDS["restored"])}
    whole = fault.resumed_s or max((fault.seconds(phase) or 0.0 for phase in SEEN), default=0.0)
    before, lines = 0.0, []
    for phase in SEEN:
        seconds = fault.seconds(phase)
        took = "never" if seconds is None else f"{seconds:.3f} s"
        bar = "" if seconds is None else _bar(before, seconds, whole)
        lines.append(
            Text.assemble(
                f"  {phase:<9}  {took:>9}  ", (f"{bar:<{BAR}}", "cyan"), "  ", (words[phase], "dim")
            )
        )
        before = before if seconds is None else seconds
    return Text("\n").join(lines)


def _bar(begin_s: float, end_s: float, whole_s: float) -> str:
    start = round(BAR * begin_s / whole_s) if whole_s else 0
    length = max(1, round(BAR * (end_s - begin_s) / whole_s)) if whole_s else 1
    start = min(start, BAR - 1)
    return " " * start + _block() * min(length, BAR - start)


def _block() -> str:
    """Return the character for bars: a full block, or ``#`` if the encoding of stdout has no block."""
    try:
        "█".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#"
    return "█"
