"""Loads: how long until the tensors are filled, cold and warm, compared with the disk's rate and with other libraries.

``python bench/store_load.py [--reps 5] [--dir DIR]`` prints markdown tables. 4 processes load a state of 1.2 GB (48 x 8
MiB x {parameter, exp_avg, exp_avg_sq}) of random data, with verification. Contenders take turns inside one run, in the
same minutes as the roofs. Cold: the files were synced and dropped from the page cache, which mincore confirms. The host
of a virtual disk may still have them, therefore the roof is measured in the same minute. Warm: right after the cold
load. All targets are allocated and touched before. A load into another layout is compared with a load of the same
targets from a checkpoint in their own layout.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rounds import slowest, spread
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from holdfast.core.ids import Generation, SaveId
from holdfast.frameworks.common.numpy_state import NumpyState
from holdfast.frameworks.common.numpy_state import Shard as Held
from holdfast.store.layouts.layout import Box, Catalogue
from holdfast.store.layouts.save_plan import plan
from holdfast.store.read.load import load_into
from holdfast.store.write.writer import write_share

RANKS = 4
TENSORS = 48
ROWS, COLUMNS = 2048, 1024
KINDS = ("model", "exp_avg", "exp_avg_sq")
NAMES = [f"{kind}.{number}" for kind in KINDS for number in range(TENSORS)]
BLOCK_SIZE_BYTES = 4 * 2**20
STATE_SIZE_BYTES = len(NAMES) * ROWS * COLUMNS * 4
LIBC = ctypes.CDLL(None, use_errno=True)

LAYOUTS: dict[str, Callable[[int], Box | None]] = {
    "rows4": lambda rank: Box((rank * ROWS // 4, 0), (ROWS // 4, COLUMNS)),
    "columns4": lambda rank: Box((0, rank * COLUMNS // 4), (ROWS, COLUMNS // 4)),
    "rows2": lambda rank: Box((rank * ROWS // 2, 0), (ROWS // 2, COLUMNS)) if rank < 2 else None,
    "hsdp": lambda rank: Box((rank % 2 * ROWS // 2, 0), (ROWS // 2, COLUMNS)),
    "ddp": lambda rank: Box((0, 0), (ROWS, COLUMNS)),
}
RESHARDS = [
    ("rows4", "columns4"),
    ("columns4", "rows4"),
    ("rows4", "rows2"),
    ("rows2", "rows4"),
    ("hsdp", "ddp"),
]


def whole(name: str) -> np.ndarray[Any, Any]:
    """Return the content of one tensor, equal on every rank."""
    seed = NAMES.index(name)
    return np.random.default_rng(seed).integers(0, 2**32, (ROWS, COLUMNS), np.uint32).view(np.float32)


def state(layout: str, rank: int, *, empty: bool) -> NumpyState:
    """Return the state that one rank holds."""
    box = LAYOUTS[layout](rank)
    if box is None:
        return NumpyState([])
    cut = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
    arrays = {
        name: np.full(box.sizes, 1, np.float32) if empty else np.ascontiguousarray(whole(name)[cut])
        for name in NAMES
    }
    return NumpyState(Held(name, (ROWS, COLUMNS), box, array) for name, array in arrays.items())


def save_id(layout: str) -> SaveId:
    """Return the id of the one save of a layout."""
    return SaveId(layout, Generation(1, 1), 1, 0, "periodic")


def save(directory: Path, layout: str, rank: int) -> None:
    """Write this rank's share of a checkpoint in a layout."""
    mine = state(layout, rank, empty=False)
    world = 2 if layout == "rows2" else RANKS
    if rank < world:
        told = {
            r: NumpyState(
                Held(s.fqn, s.shape, LAYOUTS[layout](r) or Box((0, 0), (0, 0)), s.array) for s in mine.shards
            ).layout(r, world)
            for r in range(world)
        }
        catalogue = Catalogue.from_layouts(told)
        shares = plan(catalogue, frozenset(range(world)))
        write_share(directory, save_id(layout), catalogue, shares, rank, mine, {}, {rank: {}})
    dist.barrier()


def drop(directory: Path) -> None:
    """Drop every file below a directory from the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def cached_part(directory: Path) -> float:
    """Return the share of all files below a directory that is in the page cache."""
    cached = total = 0
    for path in directory.rglob("*"):
        if not path.is_file() or not path.stat().st_size:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
            count = -(-len(pages) // mmap.PAGESIZE)
            found = (ctypes.c_ubyte * count)()
            view = np.frombuffer(pages, np.uint8)
            address = ctypes.c_void_p(view.ctypes.data)
            assert LIBC.mincore(address, ctypes.c_size_t(len(pages)), found) == 0
            del view
            cached += sum(byte & 1 for byte in bytes(found))
            total += count
    return cached / max(total, 1)


class Contenders:
    """One rank, its files, and every way to load them. The targets of a layout exist only while it is measured."""

    def __init__(self, directory: Path) -> None:
        self.rank = dist.get_rank()
        self.directory = directory
        self.buffer = memoryview(mmap.mmap(-1, STATE_SIZE_BYTES // RANKS))
        np.frombuffer(self.buffer, np.uint8)[:] = 1
        self.target = state("rows4", self.rank, empty=True)
        self.layout = "rows4"
        mesh = init_device_mesh("cpu", (RANKS,))
        local = {s.fqn: torch.from_numpy(s.array) for s in self.target.shards}
        self.local = local
        self.sharded: dict[str, Any] = {
            name: DTensor.from_local(tensor, mesh, [Shard(0)]) for name, tensor in local.items()
        }

    def prepare(self) -> None:
        """Write the files of the other libraries, and one raw file per rank."""
        mine = state("rows4", self.rank, empty=False)
        tensors = {s.fqn: torch.from_numpy(s.array) for s in mine.shards}
        for name in ("raw", "torch", "safetensors", "dcp"):
            (self.directory / name).mkdir(exist_ok=True)
        torch.save(tensors, self.directory / "torch" / f"{self.rank}.pt")
        save_file(tensors, self.directory / "safetensors" / f"{self.rank}.safetensors")
        with (self.directory / "raw" / str(self.rank)).open("wb") as file:
            for shard in mine.shards:
                file.write(shard.array.reshape(-1).view(np.uint8).data)
            file.truncate(STATE_SIZE_BYTES // RANKS)
        mesh = init_device_mesh("cpu", (RANKS,))
        given = {name: DTensor.from_local(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}
        save_dcp(given, storage_writer=FileSystemWriter(str(self.directory / "dcp"), sync_files=True))

    def aim(self, layout: str) -> None:
        """Allocate the targets of another layout."""
        if layout != self.layout:
            self.target, self.local, self.sharded = NumpyState([]), {}, {}
            self.target, self.layout = state(layout, self.rank, empty=True), layout

    def _read(self, flags: int) -> None:
        fd = os.open(self.directory / "raw" / str(self.rank), os.O_RDONLY | flags)
        for offset in range(0, len(self.buffer), BLOCK_SIZE_BYTES):
            block = self.buffer[offset : offset + BLOCK_SIZE_BYTES]
            assert os.preadv(fd, [block], offset) == len(block)
        os.close(fd)

    def read(self) -> None:
        """Measure a roof: read this rank's bytes into warm memory."""
        self._read(0)

    def read_direct(self) -> None:
        """Measure a roof: read this rank's bytes past the page cache."""
        self._read(os.O_DIRECT)

    def mmap_copy(self) -> None:
        """Load without verification: map the file and copy it into the tensors."""
        with (self.directory / "raw" / str(self.rank)).open("rb") as file:
            pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        at = 0
        for shard in self.target.shards:
            goal = shard.array.reshape(-1).view(np.uint8)
            np.copyto(goal, np.frombuffer(pages, np.uint8, len(goal), at))
            at += len(goal)

    def holdfast(self, layout: str = "rows4") -> None:
        """Load with Holdfast, every extent verified."""
        targets = self.target.targets()
        if targets:
            report = load_into(self.directory / save_id(layout).directory(), targets)
            assert not report.healed

    def dcp_load(self) -> None:
        """Load with torch's distributed checkpoint."""
        load_dcp(self.sharded, storage_reader=FileSystemReader(str(self.directory / "dcp")))

    def torch_mmap(self) -> None:
        """Load with torch.load(mmap=True) and copy into the live tensors."""
        found = torch.load(self.directory / "torch" / f"{self.rank}.pt", mmap=True)
        for name, tensor in found.items():
            self.local[name].copy_(tensor)

    def torch_load(self) -> None:
        """Load with torch.load and copy into the live tensors."""
        found = torch.load(self.directory / "torch" / f"{self.rank}.pt")
        for name, tensor in found.items():
            self.local[name].copy_(tensor)

    def safetensors(self) -> None:
        """Load with safetensors' load_file and copy into the live tensors."""
        found = load_file(self.directory / "safetensors" / f"{self.rank}.safetensors")
        for name, tensor in found.items():
            self.local[name].copy_(tensor)


FOLDERS = {
    "read": "raw", "read_direct": "raw", "mmap_copy": "raw", "holdfast": save_id("rows4").directory(),
    "dcp_load": "dcp", "torch_mmap": "torch", "torch_load": "torch", "safetensors": "safetensors",
}  # fmt: skip


def timed(ways: Contenders, folder: Path, load: Callable[[], None]) -> tuple[float, float, float]:
    """Return the seconds of the slowest rank, cold and warm, and the share in the page cache before the cold load."""
    if ways.rank == 0:
        drop(folder)
    cached = slowest(cached_part(folder) if ways.rank == 0 else 0.0)
    seconds = []
    for _ in range(2):
        dist.barrier()
        began_s = time.perf_counter()
        load()
        seconds.append(slowest(time.perf_counter() - began_s))
    return seconds[0], seconds[1], cached


def anonymous_bytes() -> int:
    """Return the memory of this process that belongs to no file, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def memory_of_a_load(ways: Contenders, layout: str) -> float:
    """Return the peak of the memory that a load needs beyond its targets, in bytes, sampled every millisecond."""
    before, peak, ended = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.001):
            peak = max(peak, anonymous_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    ways.holdfast(layout)
    ended.set()
    watcher.join()
    return slowest(peak)


def check(ways: Contenders) -> None:
    """Check that the last load gave the right bits."""
    for shard in ways.target.shards[:: len(NAMES) // 3]:
        cut = tuple(slice(o, o + s) for o, s in zip(shard.box.offsets, shard.box.sizes, strict=True))
        assert shard.array.tobytes() == np.ascontiguousarray(whole(shard.fqn)[cut]).tobytes()


def work(reps: int, directory: Path, names: list[str], reshards: bool) -> None:
    """Run the benchmark as one rank. Rank 0 prints one JSON line."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
    dist.barrier()
    ways = Contenders(directory)
    ways.prepare()
    used = {"rows4"} | ({layout for pair in RESHARDS for layout in pair} if reshards else set())
    for layout in sorted(used):
        save(directory, layout, ways.rank)
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for _ in range(reps + 1):
        for name in names:
            times[name].append(timed(ways, directory / FOLDERS[name], getattr(ways, name)))
    check(ways)
    memory = {"rows4 -> rows4": memory_of_a_load(ways, "rows4")}
    pairs: dict[str, list[tuple[float, float, float]]] = {}
    for target in dict.fromkeys(pair[1] for pair in RESHARDS if reshards):
        ways.aim(target)
        sources = [target, *(pair[0] for pair in RESHARDS if pair[1] == target)]
        for _ in range(reps + 1):
            for source in sources:
                folder = directory / save_id(source).directory()
                found = timed(ways, folder, lambda source=source: ways.holdfast(source))  # type: ignore[misc]
                pairs.setdefault(f"{source} -> {target}", []).append(found)
        check(ways)
        memory[f"{sources[-1]} -> {target}"] = memory_of_a_load(ways, sources[-1])
    if ways.rank == 0:
        result = {"times": times, "pairs": pairs, "memory": memory, "load": os.getloadavg()}
        print("RESULT " + json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def report(result: dict[str, Any]) -> None:
    """Print the tables and the ratios of interest. The first round does not count."""
    rounds = {name: found[1:] for name, found in (result["times"] | result["pairs"]).items()}
    stale = max(r[2] for found in rounds.values() for r in found)
    print(
        f"\nLoad average at the end {result['load'][0]:.1f}; at most {stale:.4f} of a file was cached when cold.\n"
    )
    print("| seconds, slowest rank, min / median / max | cold | warm |\n|---|---|---|")
    for name in result["times"]:
        print(f"| {name} | {spread([r[0] for r in rounds[name]])} | {spread([r[1] for r in rounds[name]])} |")
    for what, best in (("medians", statistics.median), ("best rounds", min)):
        cold = {name: best(r[0] for r in found) for name, found in rounds.items()}
        warm = {name: best(r[1] for r in found) for name, found in rounds.items()}
        roof = min(cold[name] for name in ("read", "read_direct") if name in cold)
        print(
            f"\nBy {what}: cold {roof / cold['holdfast']:.2f} of the read roof "
            f"({STATE_SIZE_BYTES / 1e9 / roof:.2f} GB/s), warm {warm['holdfast'] / warm['mmap_copy']:.2f} x the "
            "unverified mmap copy."
        )
        if not result["pairs"]:
            continue
        print(
            f"\n| resharding, by {what} | cold, s | x same layout | warm, s | x same layout |\n|---|---|---|---|---|"
        )
        for name in result["pairs"]:
            same = " -> ".join([name.partition(" -> ")[2]] * 2)
            print(
                f"| {name} | {cold[name]:.3f} | {cold[name] / cold[same]:.2f} "
                f"| {warm[name]:.3f} | {warm[name] / warm[same]:.2f} |"
            )
    print("\nPeak extra memory: " + ", ".join(f"{k} {v / 1e6:.0f} MB" for k, v in result["memory"].items()))


def main() -> None:
    """Start the run, or work as one rank of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--only", default=",".join(FOLDERS), help="contenders, in this order")
    parser.add_argument("--no-reshard", action="store_true")
    parser.add_argument("--dir", type=Path, default=Path("bench-load"))
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        work(arguments.reps, arguments.dir, arguments.only.split(","), not arguments.no_reshard)
        return
    shutil.rmtree(arguments.dir, ignore_errors=True)
    command = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", str(RANKS)]
    try:
        done = subprocess.run(
            [*command, *sys.argv], stdout=subprocess.PIPE, stderr=sys.stderr, text=True, check=True
        )
    finally:
        shutil.rmtree(arguments.dir, ignore_errors=True)
    report(next(json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")))


if __name__ == "__main__":
    main()
