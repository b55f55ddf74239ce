"""``holdfast ckpt``: look at checkpoints, verify, repair, merge and prune them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn
from rich.table import Table

from holdfast.errors import CheckpointInvalid
from holdfast.store.policy import retention
from holdfast.store.reader import load_catalogue, load_values
from holdfast.store.root import GRACE_S, Root, resolve
from holdfast.store.tools import holdings, merge, repair
from holdfast.store.validity import Validity, inspect

PLAIN_WIDTH = 140
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def ckpt() -> None:
    """List, verify, repair, merge and prune checkpoints.

    CHECKPOINT is a checkpoint directory, a root (then its newest valid one is meant) or ROOT@STEP.
    """


@ckpt.command("ls")
@click.argument("root", type=click.Path(path_type=Path))
@click.option("--deep", is_flag=True, help="Read and verify every byte.")
@json_option
def list_checkpoints(root: Path, deep: bool, as_json: bool) -> int:
    """All attempts below ROOT, newest first, and why a bad one is bad."""
    found = Root(root).list(deep=deep)
    if as_json:
        _say_json(found)
        return 0
    table = _table("step", "checkpoint", "state", "kind", "ranks", "size", "remark")
    for one in found:
        kind = one.save_id.kind if one.save_id else ""
        remark = one.reason or "; ".join(one.damage)
        table.add_row(str(one.step), Path(one.path).name, _state(one), kind, str(one.world or ""),
                      _size(one.size_bytes), remark)  # fmt: skip
    _console().print(table if found else f"no checkpoint in {root}")
    return 0


@ckpt.command()
@click.argument("checkpoint")
@json_option
def show(checkpoint: str, as_json: bool) -> int:
    """What CHECKPOINT holds: its save, tensors and values."""
    path = resolve(checkpoint)
    judged = _valid(path)
    catalogue, values = load_catalogue(path), load_values(path)
    if as_json:
        tensors = {
            t.fqn: {"dtype": t.dtype, "shape": t.shape, "boxes": len(t.boxes)} for t in catalogue.tensors
        }
        _say_json({"checkpoint": judged, "tensors": tensors, "values": sorted(values)})
        return 0
    console = _console()
    console.print(f"{path}\nstep {judged.step}, {_state(judged)}, {judged.world} ranks, written by "
                  f"{len(judged.writers)}, copies {judged.copies}, {_size(judged.size_bytes)}\n"
                  f"values: {', '.join(sorted(values)) or 'none'}", soft_wrap=True)  # fmt: skip
    table = _table("tensor", "dtype", "shape", "boxes", "size")
    for t in catalogue.tensors:
        table.add_row(t.fqn, t.dtype, str(list(t.shape)), str(len(t.boxes)), _size(t.size_bytes))
    console.print(table)
    return 0


@ckpt.command()
@click.argument("checkpoint")
@json_option
def verify(checkpoint: str, as_json: bool) -> int:
    """Read every byte of CHECKPOINT and compare it with its digest."""
    path = resolve(checkpoint)
    with _progress("verify", inspect(path).size_bytes, quiet=as_json) as advance:
        judged = inspect(path, deep=True, progress=advance)
    if as_json:
        _say_json(judged)
    if not judged.valid:
        raise CheckpointInvalid(judged.reason, hint=f"holdfast ckpt ls {path.parent}")
    if not as_json:
        click.echo(f"{path}: {_state(judged)}, {judged.tensors} tensors, {_size(judged.size_bytes)} verified")
        for line in judged.damage:
            click.echo(f"  damaged, a copy makes up for it: {line}")
        if judged.damage:
            click.echo(f"  next: holdfast ckpt repair {path}")
    return 0


@ckpt.command()
@click.argument("checkpoint")
@click.argument("pattern", default="*")
@json_option
def holders(checkpoint: str, pattern: str, as_json: bool) -> int:
    """Which ranks held the same box of each tensor (names like PATTERN) when CHECKPOINT was saved."""
    found = holdings(resolve(checkpoint), pattern)
    if as_json:
        _say_json(found)
        return 0
    table = _table("tensor", "dtype", "shape", "box", "ranks")
    for one in found:
        table.add_row(one.fqn, one.dtype, str(list(one.shape)), str(one.box), ranges(one.ranks))
    _console().print(table)
    return 0


@ckpt.command("repair")
@click.argument("checkpoint")
@json_option
def repair_checkpoint(checkpoint: str, as_json: bool) -> int:
    """Rebuild damaged files of CHECKPOINT from its other copies."""
    path = resolve(checkpoint)
    done = repair(path)
    if as_json:
        _say_json(done)
        return 0
    for name in done.rebuilt:
        click.echo(f"rebuilt {path / name}")
    click.echo(f"{path}: valid and sealed" + ("" if done.rebuilt else "; nothing to repair"))
    return 0


@ckpt.command("merge")
@click.argument("checkpoint")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--file-size-gb", type=click.FloatRange(0), default=0.0, help="Make TARGET a directory of files "
              "up to this size, with a Hugging Face index (default: one file).")  # fmt: skip
@json_option
def merge_checkpoint(checkpoint: str, target: Path, file_size_gb: float, as_json: bool) -> int:
    """Write the whole tensors of CHECKPOINT as one safetensors file TARGET."""
    path = resolve(checkpoint)
    total = load_catalogue(path).size_bytes
    with _progress("merge", total, quiet=as_json) as advance:
        made = merge(path, target, file_size_bytes_max=int(file_size_gb * 1e9), progress=advance)
    if as_json:
        _say_json(made)
    else:
        click.echo("\n".join(made))
    return 0


@ckpt.command()
@click.argument("root", type=click.Path(path_type=Path))
@click.option("--keep", type=int, required=True, help="Keep the newest N valid checkpoints.")
@click.option("--every", "every_steps", type=int, default=0, help="Also keep one per N steps, for good.")
@click.option("--grace-s", type=float, default=GRACE_S, show_default=True, help="Spare unfinished attempts younger "
              "than this.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@json_option
def prune(root: Path, keep: int, every_steps: int, grace_s: float, dry_run: bool, as_json: bool) -> int:
    """Remove old checkpoints below ROOT; never the newest valid one, nor one that is being read or written."""
    done = Root(root).prune(retention(keep, every_steps), grace_s=grace_s, dry_run=dry_run)
    if as_json:
        _say_json(done)
        return 0
    for name in done.removed:
        click.echo(f"{'would remove' if dry_run else 'removed'} {root / name}")
    for name, reason in done.spared.items():
        click.echo(f"spared {root / name}: {reason}")
    return 0


def ranges(ranks: Iterable[int]) -> str:
    """Ascending numbers as text, runs shortened: ``0-3, 8``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in runs)


@contextmanager
def _progress(name: str, size_bytes: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr when that is a terminal; yields what advances it."""
    console = Console(stderr=True)
    columns = (name, BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(name, total=size_bytes)
        yield lambda size_bytes: bar.advance(task, size_bytes)


def _valid(path: Path) -> Validity:
    judged = inspect(path)
    if not judged.valid:
        raise CheckpointInvalid(judged.reason, hint=f"holdfast ckpt ls {path.parent}")
    return judged


def _state(judged: Validity) -> str:
    if not judged.valid:
        return "invalid"
    state = "sealed" if judged.sealed else "complete"
    return f"{state}, damaged" if judged.damage else state


def _size(size_bytes: int) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.1f} {unit}"
    return f"{size_bytes} B"


def _say_json(value: object) -> None:
    click.echo(msgspec.json.encode(value))


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table
