"""Fuzzer of checkpoints: after any change to a file, a load gives a typed error or the original.

``python -m tests.hostile.fuzz --examples N [--seed S]`` runs in this process, in bounded memory. It prints how often
the change was refused and how often the original was loaded. There are two kinds of change. Raw bytes change, which the
digests must detect. Or the content of the JSON files or of a shard header changes, with all digests adjusted, as an
attacker would do it.
"""

from __future__ import annotations

import argparse
import json
import resource
import struct
import tempfile
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from holdfast.errors import CheckpointInvalid, CheckpointMismatch
from holdfast.frameworks.common.numpy_state import NumpyState
from holdfast.store.format.manifest import unwrap, wrap
from holdfast.store.layouts.layout import flat_range_boxes
from holdfast.store.manage.checkpoint_tools import holdings
from holdfast.store.manage.repair import repair
from holdfast.store.read.load import load_into, load_locals, load_values
from holdfast.store.read.validation import inspect
from tests.store.worlds import World, grid, random_array, replicated, save, save_id

MEMORY_SIZE_BYTES = 192 * 2**20
"""Of address space, beyond what the process has when it begins."""

ARRAYS = {
    "layer.weight": random_array((30, 20), "float32", 1),
    "layer.bias": random_array((7,), "float64", 2),
    "steps": np.array(7, np.int64),
    "empty": np.zeros((0, 3), np.int16),
}
SHARD = "shard-r00000-000.safetensors"
SIZES = (0, 1, -1, 7, 8, 2**31, 2**32, 2**47, 2**48, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30)
NAMES = (
    "",
    ".",
    "..",
    "/",
    "../../etc/passwd",
    "/dev/zero",
    "a\0b",
    "__metadata__",
    "steps",
    "x" * 5000,
    "\U0001f600",
)

odd = st.one_of(
    st.sampled_from(SIZES),
    st.sampled_from(NAMES),
    st.sampled_from(
        [None, True, 1.5, 1e300, [], {}, [[]], {"$tuple": []}, {"$map": [[1]]}, {"$int": "9" * 5000}]
    ),
    st.lists(st.sampled_from(SIZES), max_size=40),
    st.integers(0, 12).map(lambda n: json.loads("[" * 2**n + "]" * 2**n) if n < 9 else ["x"] * 2**n),
)


def sharded() -> World:
    """Return a job of four ranks with a flat range of one tensor each, halves of another, and tensors that all hold."""
    world = replicated(4, ARRAYS)
    weight, bias = ARRAYS["layer.weight"].shape, ARRAYS["layer.bias"].shape
    for rank, held in enumerate(world.held):
        whole = [(fqn, box) for fqn, box in held if not fqn.startswith("layer")]
        pieces = flat_range_boxes(weight, rank * 150, rank * 150 + 150)
        world.held[rank] = [*whole, ("layer.bias", grid(bias, {0: 2})[rank % 2])]
        world.held[rank] += [("layer.weight", box) for box in pieces]
    return world


class Checkpoint:
    """A sealed checkpoint, restored for each example."""

    def __init__(self, root: Path, world: World, copies: int = 1) -> None:
        save(root, world, save_id(), copies=copies)
        self.writers = range(world.size)
        self.path = root / save_id().directory()
        self.pristine = {file.name: file.read_bytes() for file in sorted(self.path.iterdir())}
        self.outcomes: Counter[str] = Counter()

    def restore(self) -> None:
        """Restore the original files."""
        for file in self.path.iterdir():
            if file.name not in self.pristine:
                file.unlink()
        for name, data in self.pristine.items():
            if not (self.path / name).exists() or (self.path / name).read_bytes() != data:
                (self.path / name).write_bytes(data)

    def check(self, mend: bool) -> None:
        """Check the property. ``mend``: repair the checkpoint before, if possible."""
        if mend:
            try:
                repair(self.path)
            except CheckpointInvalid:
                pass
        state = NumpyState.whole({fqn: np.zeros_like(array) for fqn, array in ARRAYS.items()})
        judged = inspect(self.path, deep=True, threads=1)
        try:
            load_into(self.path, state.targets(), threads=1)
        except (CheckpointInvalid, CheckpointMismatch) as error:
            self.outcomes[f"load: {type(error).__name__}"] += 1
        else:
            self.outcomes["load: original"] += 1
            for shard in state.shards:
                assert shard.array.tobytes() == ARRAYS[shard.fqn].tobytes(), shard.fqn
        assert judged.valid or judged.reason
        if judged.valid:
            holdings(self.path)
        for read in (load_values, lambda path: load_locals(path, 0)):
            try:
                value = read(self.path)
            except CheckpointInvalid:
                self.outcomes["values: CheckpointInvalid"] += 1
            else:
                self.outcomes["values: read"] += 1
                assert isinstance(value, dict)


@st.composite
def raw_changes(draw: st.DrawFn, size_bytes: int) -> Callable[[bytes], bytes]:
    """Draw a change of the bytes of a file of this size."""
    at, stop = sorted((draw(st.integers(0, size_bytes)), draw(st.integers(0, size_bytes))))
    kind = draw(st.sampled_from(["flip", "cut", "delete", "repeat", "insert", "zero", "word"]))
    bit, text = draw(st.integers(0, 7)), draw(st.binary(min_size=1, max_size=9))
    word = struct.pack("<Q", draw(st.sampled_from([n for n in SIZES if 0 <= n < 2**64])))

    def change(data: bytes) -> bytes:
        if kind == "flip":
            place = min(at, len(data) - 1)
            return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]
        made = {
            "cut": b"", "delete": data[stop:], "repeat": data[at:stop] * 2 + data[stop:],
            "insert": text + data[at:], "zero": bytes(stop - at) + data[stop:], "word": word + data[at + 8 :],
        }  # fmt: skip
        return data[:at] + made[kind]

    return change


def places(tree: Any, prefix: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return all paths of a JSON tree."""
    found = [prefix] if prefix else []
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return found + [place for key, value in pairs for place in places(value, (*prefix, key))]


def parent(tree: Any, place: tuple[str | int, ...]) -> Any:
    """Return the container of a path."""
    for key in place[:-1]:
        tree = tree[key]
    return tree


@st.composite
def said(draw: st.DrawFn, body: bytes) -> bytes:
    """Draw a variant of the JSON text ``body`` with one to three changes; sometimes a key appears twice."""
    tree = json.loads(body)
    for _ in range(draw(st.integers(1, 3))):
        found = places(tree)
        if not found:
            break
        one, two = draw(st.sampled_from(found)), draw(st.sampled_from(found))
        kind = draw(st.sampled_from(["set", "drop", "swap", "again", "near"]))
        holder, key = parent(tree, one), one[-1]
        if kind == "drop":
            del holder[key]
        elif kind == "swap":
            mine, theirs = (json.dumps(parent(tree, place)[place[-1]]) for place in (one, two))
            holder[key] = json.loads(theirs)
            if one != two[: len(one)] and two != one[: len(two)]:
                parent(tree, two)[two[-1]] = json.loads(mine)
        elif kind == "again" and isinstance(holder, list):
            holder.insert(draw(st.integers(0, len(holder))), deepcopy(holder[int(key)]))
        elif kind == "near" and type(holder[key]) is int:
            holder[key] += draw(st.sampled_from([-4096, -8, -1, 1, 8, 4096]))
        else:
            holder[key] = deepcopy(draw(odd))
    text = json.dumps(tree, separators=(",", ":"), ensure_ascii=False)
    if draw(st.integers(0, 9)) == 0:
        text = text.replace("{", '{"version":1,', 1)
    return text.encode("utf-8", "surrogatepass")


def with_catalogue(checkpoint: Checkpoint, data: bytes) -> None:
    """Write another catalogue, and adjust the digest in all manifests."""
    digest = xxhash.xxh3_128_hexdigest(unwrap(data, "")[0])
    (checkpoint.path / "catalogue.json").write_bytes(data)
    for rank in checkpoint.writers:
        name = f"rank-r{rank:05d}.json"
        tree = json.loads(unwrap(checkpoint.pristine[name], name)[0])
        tree["catalogue"] = digest
        body = json.dumps(tree, separators=(",", ":")).encode()
        (checkpoint.path / name).write_bytes(wrap(body))


def with_header(checkpoint: Checkpoint, text: bytes, size_bytes: int) -> None:
    """Write another header into a shard, and adjust the digest in its manifest."""
    data = checkpoint.pristine[SHARD]
    start = 8 + struct.unpack("<Q", data[:8])[0]
    head = struct.pack("<Q", size_bytes) + text.ljust(start - 8)[: start - 8]
    (checkpoint.path / SHARD).write_bytes(head + data[start:])
    tree = json.loads(unwrap(checkpoint.pristine["rank-r00000.json"], "")[0])
    tree["files"][0]["header_digest"] = xxhash.xxh3_64_hexdigest(head)
    body = json.dumps(tree, separators=(",", ":")).encode()
    (checkpoint.path / "rank-r00000.json").write_bytes(wrap(body))


@st.composite
def damaged(draw: st.DrawFn, checkpoints: list[Checkpoint]) -> tuple[Checkpoint, dict[str, bytes]]:
    """Draw a checkpoint and other bytes for one or two of its files."""
    checkpoint = draw(st.sampled_from(checkpoints))
    changed: dict[str, bytes] = {}
    for name in draw(st.lists(st.sampled_from(sorted(checkpoint.pristine)), min_size=1, max_size=2)):
        data = checkpoint.pristine[name]
        changed[name] = draw(raw_changes(len(data)))(data)
    return checkpoint, changed


@st.composite
def retold(draw: st.DrawFn, checkpoints: list[Checkpoint], name: str) -> tuple[Checkpoint, bytes]:
    """Draw a checkpoint and other content for the body of one of its JSON files."""
    checkpoint = draw(st.sampled_from(checkpoints))
    return checkpoint, draw(said(unwrap(checkpoint.pristine[name], "")[0]))


def fuzz(examples: int, number: int, root: Path) -> dict[str, Counter[str]]:
    """Run every kind of change ``examples`` times. Return the outcomes by kind.

    Raises:
        AssertionError, or another exception of a load: the property does not hold; hypothesis prints the change.
    """
    single = Checkpoint(root / "single", replicated(2, ARRAYS))
    double = Checkpoint(root / "double", replicated(2, ARRAYS), copies=2)
    cut = Checkpoint(root / "cut", sharded())
    common = settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    outcomes: dict[str, Counter[str]] = {}

    @common
    @seed(number)
    @given(damaged([single, double, cut]), st.booleans())
    def bytes_changed(drawn: tuple[Checkpoint, dict[str, bytes]], mend: bool) -> None:
        checkpoint, changed = drawn
        checkpoint.restore()
        for name, data in changed.items():
            (checkpoint.path / name).write_bytes(data)
        checkpoint.check(mend)

    @common
    @seed(number)
    @given(retold([single, cut], "rank-r00000.json"))
    def manifest_changed(drawn: tuple[Checkpoint, bytes]) -> None:
        checkpoint, body = drawn
        checkpoint.restore()
        (checkpoint.path / "rank-r00000.json").write_bytes(wrap(body))
        checkpoint.check(mend=False)

    @common
    @seed(number)
    @given(retold([single, cut], "catalogue.json"))
    def catalogue_changed(drawn: tuple[Checkpoint, bytes]) -> None:
        checkpoint, body = drawn
        checkpoint.restore()
        with_catalogue(checkpoint, wrap(body))
        checkpoint.check(mend=False)

    start = 8 + struct.unpack("<Q", single.pristine[SHARD][:8])[0]

    @common
    @seed(number)
    @given(
        said(single.pristine[SHARD][8:start]),
        st.sampled_from([start - 8, *(n for n in SIZES if 0 <= n < 2**64)]),
    )
    def header_changed(text: bytes, size_bytes: int) -> None:
        single.restore()
        with_header(single, text, size_bytes)
        single.check(mend=False)

    for check in (bytes_changed, manifest_changed, catalogue_changed, header_changed):
        single.outcomes, double.outcomes, cut.outcomes = Counter(), Counter(), Counter()
        check()
        outcomes[check.__name__] = single.outcomes + double.outcomes + cut.outcomes
    return outcomes


def limit_memory() -> None:
    """Limit the memory: allocations of much more than a checkpoint's size fail from now on."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_SIZE_BYTES, used + MEMORY_SIZE_BYTES))


def main() -> None:
    """Fuzz, as the module's docstring says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given_ = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        limit_memory()
        found = fuzz(given_.examples, given_.seed, Path(folder))
    print(json.dumps({name: dict(sorted(counts.items())) for name, counts in found.items()}, indent=1))


if __name__ == "__main__":
    main()
