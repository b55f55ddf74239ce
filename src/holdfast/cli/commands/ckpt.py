"""The command ``holdfast ckpt``, which lists, verifies, repairs, merges, converts and prunes checkpoints."""

from __future__ import annotations

import importlib.util
import math
import re
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Literal

import click
import msgspec
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

from holdfast.cli.screen.checkpoint_contents import readable, totals
from holdfast.cli.screen.completers import checkpoints, files
from holdfast.cli.screen.console import SafeConsole, print_table
from holdfast.cli.screen.error_output import say
from holdfast.cli.screen.escaping import echo, echo_json
from holdfast.cli.start.finite_number import FiniteNumber
from holdfast.core.ids import STEP_MAX
from holdfast.errors import CheckpointInvalid, StoreError, UsageError
from holdfast.runtime.node.run_settings import without_launch
from holdfast.store.backends.durable_files import mode_of
from holdfast.store.backends.location import Place, place_of
from holdfast.store.manage.checkpoint_root import (
    GRACE_S,
    Choice,
    Root,
    choose,
    find,
    is_attempt,
    list_command,
    repair_command,
)
from holdfast.store.manage.checkpoint_tools import holdings, merge
from holdfast.store.manage.repair import Repaired, repair
from holdfast.store.manage.retention import KeepEvery, KeepFor, KeepNewest, KeepPolicy
from holdfast.store.mindspore.group_info import read_group_info
from holdfast.store.read.load import load_catalogue, load_locals, load_values, opened
from holdfast.store.read.validation import Validity, inspect, judge
from holdfast.text import plural, ranges, span

HOLDERS_SHOWN = 10_000
VALUES_SHOWN = 60
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")


ORDER = ("ls", "show", "verify", "repair", "holders", "export", "import", "merge", "prune")


class Ordered(click.Group):
    """A command group whose help lists the commands in the order of ``ORDER``, and not alphabetically."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.index)


@click.group(cls=Ordered, context_settings={"help_option_names": ["-h", "--help"]})
def ckpt() -> None:
    """List, verify, repair, merge, convert and prune checkpoints.

    CHECKPOINT is a checkpoint directory, ROOT@STEP, or ROOT, which means the newest valid checkpoint in it.
    """


@ckpt.command("ls")
@click.argument("root", shell_complete=files)
@click.option("--deep", is_flag=True, help="Read and verify every byte.")
@json_option
def list_checkpoints(root: str, deep: bool, as_json: bool) -> int:
    """List all checkpoints below ROOT, newest first, with the reason why one cannot be used.

    A sealed checkpoint is complete, and the rank that wrote last has marked it so. A complete one has no such mark.
    In an unfinished one the shares of some ranks are missing. In a damaged one some files have changed since they
    were written.
    """
    place = _root(root)
    found = place.list(deep=deep)
    if as_json:
        _say_json(found)
        return 0
    if not found:
        echo(f"no checkpoint in {root}")
        return 0
    rows = [
        (str(one.step), _age(place, one), without_launch(one.save_id.run) if one.save_id else "", one.name, _state(one),
         one.save_id.kind if one.save_id else "", str(one.world or ""), _size(one.size_bytes),
         one.reason or "; ".join(one.damage))
        for one in found
    ]  # fmt: skip
    print_table(("step", "age", "run", "checkpoint", "state", "kind", "ranks", "size", "remark"), rows)
    return 0


@ckpt.command()
@click.argument("checkpoint", shell_complete=checkpoints)
@json_option
def show(checkpoint: str, as_json: bool) -> int:
    """Show the contents of CHECKPOINT: its save, values (learning rate, epoch, position), and tensors with totals."""
    with _checkpoint(checkpoint) as path, opened(path) as source:
        judged = judge(source.directory, source.index)
        catalogue, values = load_catalogue(source), load_values(source)
        position = load_locals(source, min(judged.writers, default=0))
    plain = readable({**values, "position": position})
    sums = totals(catalogue.tensors)
    if as_json:
        tensors = {
            t.fqn: {"dtype": t.dtype, "shape": t.shape, "boxes": len(catalogue.boxes(t))}
            for t in catalogue.tensors
        }
        _say_json(
            {
                "checkpoint": judged,
                "tensors": tensors,
                "values": sorted(values),
                "plain": plain,
                "totals": sums,
            }
        )
        return 0
    echo(f"{path}\nstep {judged.step}, {_state(judged)}, {plural(judged.world, 'rank')}, written by "
               f"{len(judged.writers)}, copies {judged.copies}, {_size(judged.size_bytes)}\n"
               f"values: {', '.join(sorted(values)) or 'none'}")  # fmt: skip
    shown = list(plain.items())[:VALUES_SHOWN]
    if shown:
        print_table(("value", ""), shown)
    if len(plain) > len(shown):
        echo(f"... {len(plain) - len(shown)} more: --json")
    rows = [
        (t.fqn, t.dtype, str(list(t.shape)), str(len(catalogue.boxes(t))), _size(t.size_bytes))
        for t in catalogue.tensors
    ]
    print_table(("tensor", "dtype", "shape", "parts", "size"), rows)
    for dtype, total in sums.items():
        echo(
            f"total {dtype}: {plural(total.tensors, 'tensor')}, {plural(total.elements, 'element')}, "
            f"{_size(total.size_bytes)}"
        )
    return 0


@ckpt.command()
@click.argument("checkpoint", shell_complete=checkpoints)
@json_option
def verify(checkpoint: str, as_json: bool) -> int:
    """Read every byte of CHECKPOINT and compare it with its digest."""
    with _checkpoint(checkpoint) as path:
        with _progress("verify", inspect(path).size_bytes, quiet=as_json) as advance:
            judged = inspect(path, deep=True, progress=advance)
        if as_json:
            _say_json(judged)
        if not judged.valid:
            raise CheckpointInvalid(judged.reason)
    if not as_json:
        echo(
            f"{path}: {_state(judged)}, {plural(judged.tensors, 'tensor')}, {_size(judged.size_bytes)} verified"
        )
        for line in judged.damage:
            echo(f"  damaged, a copy makes up for it: {line}")
        if judged.damage:
            echo(f"  next: holdfast ckpt repair {shlex.quote(str(path))}")
    return 0


@ckpt.command(short_help="Which ranks held what when it was saved.")
@click.argument("checkpoint", required=False, shell_complete=checkpoints)
@click.argument("pattern", default="*")
@click.option("--group-info", type=click.Path(path_type=Path), help="Read MindSpore's file (GROUP_INFO_FILE) instead "
              "of a checkpoint: the ranks whose slices can stand in for each other.")  # fmt: skip
@json_option
def holders(checkpoint: str | None, pattern: str, group_info: Path | None, as_json: bool) -> int:
    """List the ranks that held the same part of a tensor when CHECKPOINT was saved.

    Only tensors with names like PATTERN are listed. A part is printed as the index of its first element and its size,
    in each dimension.
    """
    if (checkpoint is None) == (group_info is None):
        raise UsageError(
            "name a checkpoint, or a file with --group-info", hint="holdfast ckpt holders --help"
        )
    if group_info is not None:
        info = read_group_info(group_info)
        if as_json:
            _say_json(info)
        else:
            echo(ranges(info.ranks))
        return 0
    with _checkpoint(str(checkpoint)) as path:
        found = holdings(path, pattern)
    if as_json:
        before = "["
        for one in found:
            echo_json(before.encode() + msgspec.json.encode(one), nl=False)
            before = ","
        echo("[]" if before == "[" else "]")
        return 0
    rows = [
        (one.fqn, one.dtype, str(list(one.shape)), str(one.box), ranges(one.ranks))
        for one in islice(found, HOLDERS_SHOWN)
    ]
    print_table(("tensor", "dtype", "shape", "part", "ranks"), rows)
    if next(found, None) is not None:
        echo(f"... the first {HOLDERS_SHOWN} of more: give a narrower PATTERN, or --json for all")
    return 0


@ckpt.command("repair", short_help="Rebuild damaged files from copies.")
@click.argument("checkpoint", shell_complete=checkpoints)
@click.option("--dry-run", is_flag=True, help="Only say what would be rebuilt, or why it cannot be.")
@json_option
def repair_checkpoint(checkpoint: str, dry_run: bool, as_json: bool) -> int:
    """Rebuild the damaged files of CHECKPOINT from copies and digests.

    For a root, the newest checkpoint that can be repaired is repaired.
    """
    path, done = _repair_first(_to_repair(checkpoint), dry_run)
    if as_json:
        _say_json({"path": str(path), **msgspec.structs.asdict(done)})
        return 0
    for name in done.rebuilt:
        echo(f"{'would rebuild' if dry_run else 'rebuilt'} {path / name}")
    if done.sealed:
        echo(
            f"{path}: valid and sealed (whole, and marked so)"
            + ("" if done.rebuilt else "; nothing to repair")
        )
    return 0


def size_bytes(text: str) -> int:
    """Return the number of bytes in a text such as ``5GB``, ``500 mb``, ``4GiB`` or ``1000000``.

    Raises:
        click.BadParameter: the text has another form, or means 0 bytes.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(i?))?b?", text.strip().lower())
    if match is None or not float(match[1]):
        raise click.BadParameter(f"{text!r} is not a size; write 5GB, 500MB, 4GiB or a number of bytes")
    unit = 1024 if match[3] else 1000
    return max(1, int(float(match[1]) * unit ** " kmgt".index(match[2] or " ")))


@ckpt.command("merge", short_help="Write whole tensors as one safetensors file.")
@click.argument("checkpoint", shell_complete=checkpoints)
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--max-shard-size", "max_size_bytes", type=size_bytes, help="Make TARGET a directory: "
              "model.safetensors, or files up to this size (5GB) with an index (default: one file).")  # fmt: skip
@json_option
def merge_checkpoint(checkpoint: str, target: Path, max_size_bytes: int | None, as_json: bool) -> int:
    """Write the whole tensors of CHECKPOINT as one safetensors file TARGET."""
    with _checkpoint(checkpoint) as path, opened(path) as source:
        with _progress("merge", load_catalogue(source).size_bytes, quiet=as_json) as advance:
            made = merge(source, target, file_size_bytes_max=max_size_bytes or 0, progress=advance)
    _say_made(made, as_json)
    return 0


@ckpt.command("export", short_help="Write torch.save, DCP or Hugging Face files.")
@click.argument("checkpoint", shell_complete=checkpoints)
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--to", type=click.Choice(["dcp", "torch", "hf"]), required=True, help="DCP directory, torch.save file, "
              "or a directory with the model alone in Hugging Face's form.")  # fmt: skip
@click.option(
    "--max-shard-size",
    "max_size_bytes",
    type=size_bytes,
    default="5GB",
    show_default=True,
    help="Of a file, with hf.",
)
@json_option
def export(
    checkpoint: str, target: Path, to: Literal["dcp", "torch", "hf"], max_size_bytes: int, as_json: bool
) -> int:
    """Write CHECKPOINT as TARGET, for other programs."""
    _needs_torch()
    from holdfast.frameworks.torch.files.exports import export_checkpoint

    with _checkpoint(checkpoint) as path, opened(path) as source:
        with _progress("export", load_catalogue(source).size_bytes, quiet=as_json) as advance:
            made = export_checkpoint(source, target, to, file_size_bytes_max=max_size_bytes, progress=advance)
    _say_made(made, as_json)
    return 0


@ckpt.command("import", short_help="Take torch.save, DCP, Megatron, MindSpore or safetensors files.")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("root", shell_complete=files)
@click.option("--step", type=click.IntRange(0, STEP_MAX), help="Updates done (default: what SOURCE says).")
@click.option("--map", "names", multiple=True, metavar="KEY=PART", help="KEY of SOURCE is PART (model, optimizer, "
              "scheduler, scaler, step), for example opt=optimizer; repeatable.")  # fmt: skip
@click.option("--strategy", type=click.Path(path_type=Path), help="SOURCE holds the slices of a parallel training of "
              "MindSpore's: its strategy file (protobuf or JSON), the merged one, or a directory.")  # fmt: skip
@json_option
def import_(
    source: Path, root: str, step: int | None, names: tuple[str, ...], strategy: Path | None, as_json: bool
) -> int:
    """Write SOURCE as a checkpoint below ROOT.

    SOURCE is a torch.save file, a torch DCP directory, a .safetensors file, a directory with model.safetensors or
    model.safetensors.index.json, or a directory of Megatron (iter_N with its mp_rank_XX, or the directory above
    it). With --strategy, SOURCE is a directory with MindSpore's rank_N/*.ckpt.
    """
    with ExitStack() as stack:

        def progress(total: int) -> Callable[[int], None]:
            return stack.enter_context(_progress("import", total, quiet=as_json))

        if strategy is not None:
            if names:
                raise UsageError(
                    "--map is not for slices: --strategy names their parts", hint="leave --map out"
                )
            from holdfast.frameworks.mindspore.sliced_checkpoints import import_slices

            made = import_slices(source, strategy, root, step=step, progress=progress, note=say)
        else:
            _needs_torch()
            from holdfast.frameworks.torch.files.imports import import_checkpoint

            made = import_checkpoint(
                source, root, step=step, names=_mapped(names), progress=progress, note=say
            )
    _say_made((str(made),), as_json)
    return 0


@ckpt.command(short_help="Remove old checkpoints, never the newest.")
@click.argument("root", shell_complete=files)
@click.option("--keep", type=int, required=True, help="Keep the newest N valid checkpoints.")
@click.option("--every", "every_steps", type=int, default=0, help="Also keep one per N steps, for good.")
@click.option(
    "--hours", type=FiniteNumber(min=0), default=0.0, help="Also keep those of the last so many hours."
)
@click.option("--grace-s", type=FiniteNumber(min=0), default=GRACE_S, show_default=True,
              help="Spare attempts that are not valid, and the newest of each run, younger than this.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@json_option
def prune(
    root: str, keep: int, every_steps: int, hours: float, grace_s: float, dry_run: bool, as_json: bool
) -> int:
    """Remove old checkpoints below ROOT, except the newest valid one and those being read or written."""
    place = place_of(root)
    policies: list[KeepPolicy] = [KeepNewest(keep)]
    if every_steps:
        policies.append(KeepEvery(every_steps))
    if hours:
        policies.append(KeepFor(3600 * hours))
    done = _root(root).prune(policies, grace_s=grace_s, dry_run=dry_run)
    if as_json:
        _say_json(done)
        return 0
    for name in done.removed:
        echo(f"{'would remove' if dry_run else 'removed'} {place / name}")
    for name, reason in done.spared.items():
        echo(f"spared {place / name}: {reason}")
    if not done.removed:
        echo(f"nothing to remove below {place}")
    return 0


def _mapped(texts: Iterable[str]) -> dict[str, str]:
    """Parse the texts ``KEY=PART`` of ``--map``. Return {KEY: PART}: the part of the state under each key of SOURCE.

    Raises:
        UsageError: a text has another form, or a key occurs twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        key, equals, part = text.partition("=")
        if not (key and equals and part) or key in found:
            raise UsageError(
                f"--map {text} is not KEY=PART, each KEY once", hint="for example --map opt=optimizer"
            )
        found[key] = part
    return found


@contextmanager
def _progress(name: str, size_bytes: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr, if that is a terminal. Yield a function that advances the bar by bytes."""
    console = SafeConsole(stderr=True)
    columns = (name, BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(name, total=size_bytes)
        yield lambda size_bytes: bar.advance(task, size_bytes)


def _needs_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise UsageError(
            "torch is not installed; this command needs it", hint="pip install 'holdfast[torch]'"
        )


def _say_made(made: Iterable[str], as_json: bool) -> None:
    if as_json:
        # A name that is not valid Unicode is escaped as in the text output: JSON cannot hold it.
        _say_json([name.encode(errors="backslashreplace").decode() for name in made])
    else:
        echo("\n".join(made))


@contextmanager
def _checkpoint(text: str) -> Iterator[Place]:
    """Yield the checkpoint that ``text`` (a checkpoint, a root or ROOT@STEP) means.

    Print which newer checkpoints were skipped as invalid. Add a hint to an error about a damaged checkpoint.
    """
    found = find(text)
    for note in found.notes():
        say(f"note: {note}")
    try:
        yield found.path
    except CheckpointInvalid as error:
        error.hint = error.hint or (
            f"{repair_command(found.path)}  (or another one: {list_command(found.path.parent)})"
        )
        raise


def _to_repair(text: str) -> list[Place]:
    """Return the checkpoints that a repair may try, newest first.

    For a root they are the newest valid checkpoint and the newer ones that may be repairable.
    """
    choice = choose(text)
    if not isinstance(choice, Choice):
        return [choice]
    if not choice.repairable:
        return [place_of(choice.require().path)]
    chosen = () if choice.chosen is None else (choice.chosen,)
    return [place_of(v.path) for v in (*choice.repairable, *chosen)]


def _repair_first(paths: list[Place], dry_run: bool) -> tuple[Place, Repaired]:
    """Repair the first of some checkpoints that can be repaired. Return its path and the changes.

    Raises:
        CheckpointInvalid: no checkpoint can be repaired. The error is about the last of ``paths``.
    """
    *others, last = paths
    for path in others:
        try:
            return path, repair(path, dry_run=dry_run)
        except CheckpointInvalid as error:
            say(f"{path} cannot be rebuilt: {error.message}")
    try:
        return last, repair(last, dry_run=dry_run)
    except CheckpointInvalid as error:
        error.hint = error.hint or f"it cannot be rebuilt; another one: {list_command(last.parent)}"
        raise


def _root(text: str) -> Root:
    """Return the root of checkpoints that the user names.

    Raises:
        UsageError: the directory does not exist, or is itself a checkpoint.
    """
    place = place_of(text)
    mode = mode_of(place) if isinstance(place, Path) else stat.S_IFDIR
    if mode is None:
        raise UsageError(f"{place} does not exist", hint="name the directory that the session saves to")
    if stat.S_ISREG(mode):
        raise UsageError(f"{place} is a file", hint="name the directory that the session saves to")
    if is_attempt(place):
        raise UsageError(
            f"{place} is a checkpoint, not a directory of them",
            hint=f"holdfast ckpt show {shlex.quote(str(place))}, or its directory: {list_command(place.parent)}",
        )
    return Root(place)


def _age(place: Root, judged: Validity) -> str:
    """Return the time since a checkpoint was written, as text; empty if it is unknown."""
    try:
        age_s = place.age_s(judged.name)
    except (CheckpointInvalid, StoreError):  # no permission, or the store does not answer
        return ""
    return span(max(0.0, age_s)) if math.isfinite(age_s) else ""


def _state(judged: Validity) -> str:
    if judged.denied:
        return "unreadable"
    if not judged.valid:
        return "unfinished" if judged.unfinished else "invalid"
    state = "sealed" if judged.sealed else "complete"
    return f"{state}, damaged" if judged.damage else state


def _size(size_bytes: int) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.1f} {unit}"
    return f"{size_bytes} B"


def _say_json(value: object) -> None:
    echo_json(msgspec.json.encode(value))
