"""Saves beside the training: how long the step waits and when the bytes are on disk, compared with other libraries.

``python bench/store.py [--reps 5] [--dir DIR]`` runs 4 ranks twice (sharded, replicated) and prints markdown tables.

The state has 1.2 GB (48 x 8 MiB x {parameter, exp_avg, exp_avg_sq}) of random data. Contenders take turns inside one
run: A B C A B C. The roofs, which bound every contender, are measured in the same minutes: one copy of the rank's
share into warm memory, and the disk written by 4 processes in three ways. The clock of "durable" stops after fsync.
The first round does not count.

DLRover's flash checkpoint and torch_checkpointing take part where they are installed, and are left out elsewhere:

    python -m venv peers
    peers/bin/pip install torch==2.13.0 safetensors dlrover==0.6.1 grpcio torch_checkpointing==0.1.1
    peers/bin/pip install click msgspec numpy rich xxhash
    PYTHONPATH=src peers/bin/python bench/store.py
"""

from __future__ import annotations

import argparse
import importlib.util
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rounds import slowest, spread
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from holdfast.core.ids import Generation, SaveId
from holdfast.errors import HoldfastError
from holdfast.frameworks.common.numpy_state import NumpyState
from holdfast.frameworks.common.numpy_state import Shard as Held
from holdfast.store.layouts.layout import Box, Catalogue
from holdfast.store.layouts.save_plan import plan
from holdfast.store.write.async_save import BackgroundSaver
from holdfast.store.write.writer import WrittenShare

RANKS = 4
TENSORS = 48
ROWS, COLUMNS = 2048, 1024
KINDS = ("model", "exp_avg", "exp_avg_sq")
BLOCK_SIZE_BYTES = 16 * 2**20
STATE_SIZE_BYTES = TENSORS * len(KINDS) * ROWS * COLUMNS * 4
SHARE_SIZE_BYTES = STATE_SIZE_BYTES // RANKS

Begun = Callable[[], None]
"""The function that a contender returns when the step may continue. A call waits until everything is on the disk."""


def nothing() -> None:
    """Do nothing: the save was on disk when it returned."""


def fsync(path: Path) -> None:
    """Sync a file and its directory."""
    for one in (path, path.parent):
        fd = os.open(one, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


class Flash:
    """DLRover's flash checkpoint: one copy into shared memory, from which a process of the node writes with torch.save.

    DLRover's agent runs this process. Without an agent, each job has to fork it from a worker.
    """

    PROCESS = """
import sys
from dlrover.python.elastic_agent.torch.ckpt_saver import AsyncCheckpointSaver
AsyncCheckpointSaver.start_async_saving_ckpt()
sys.stdin.read()
AsyncCheckpointSaver.get_ckpt_saver().close()
"""

    def __init__(self, rank: int, shards: int, directory: Path) -> None:
        os.environ["ROLE_NAME"] = "dlrover-trainer"
        command = [sys.executable, "-c", self.PROCESS]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE) if rank == 0 else None
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self._newest = directory / "dlrover" / "dlrover_latest.txt"
        self._checkpointer = DdpCheckpointer(str(self._newest.parent), shards, shards)
        self._writes = rank < shards
        self._step = 0

    def save(self, state: dict[str, torch.Tensor], path: Path, kind: str) -> Begun:
        """Save a state. ``kind`` is MEMORY or DISK."""
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType

        self._step += 1
        self._checkpointer.save_checkpoint(self._step, state, str(path), StorageType[kind])
        return nothing if kind == "MEMORY" else lambda: self._wait(path)

    def _wait(self, path: Path) -> None:
        """Wait until DLRover names this step as its newest, then sync the tensors, which DLRover never does."""
        deadline_s = time.monotonic() + 100
        while not self._newest.exists() or self._newest.read_text() != str(self._step):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"DLRover did not write {path}")
            time.sleep(0.005)
        if self._writes:
            fsync(path)

    def close(self) -> None:
        """End the process of DLRover, which frees its shared memory."""
        from dlrover.python.common.multi_process import SOCKET_TMP_DIR

        if self._process:
            self._process.communicate()
            shutil.rmtree(Path(SOCKET_TMP_DIR, os.environ["TORCHELASTIC_RUN_ID"]), ignore_errors=True)


class TorchCheckpointing:
    """meta-pytorch's torch_checkpointing: staged by a thread, written by a process per rank.

    Its direct writes start at any address and have any length. ext4 refuses them (EINVAL), so they are off. It gathers
    the metadata for another layout through CUDA only, so a rank saves its tensors as they are.
    """

    def __init__(self, rank: int, sharded: bool) -> None:
        from torch_checkpointing import AsyncCheckpointSaverConfig, CheckpointManager, CheckpointWriterConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        writer = CheckpointWriterConfig(file_write_max_threads=1 if sharded else len(KINDS))
        self._rank = rank
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(writer_config=writer),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def save(self, state: dict[str, dict[str, torch.Tensor]], where: Path) -> Begun:
        """Save a state. The step may change its state when the lock is free, which means that everything is staged."""
        written = self._manager.save(str(where / "saved"), state)
        with self._manager.lock():
            return lambda: self._wait(written, where / "saved")

    def _wait(self, written: Any, saved: Path) -> None:
        """Wait until rank 0 has renamed the directory, then sync the files, which the library never does."""
        written.result()
        dist.barrier()
        for path in (*saved.glob(f"*_{self._rank}.pt"), saved):
            fsync(path)

    def close(self) -> None:
        """End the process of the library."""
        self._manager.close()


class Contenders:
    """The state of one rank, and every way to save it."""

    def __init__(self, layout: str, chosen: list[str], directory: Path) -> None:
        self._kept = ExitStack()
        self.rank = dist.get_rank()
        self.sharded = layout == "sharded"
        generator = torch.Generator().manual_seed(self.rank if self.sharded else 0)
        rows = ROWS // RANKS if self.sharded else ROWS
        names = [f"{kind}.{number}" for kind in KINDS for number in range(TENSORS)]
        self.local = {name: torch.rand(rows, COLUMNS, generator=generator) for name in names}
        self.state: dict[str, Any] = dict(self.local)
        if self.sharded:
            mesh = init_device_mesh("cpu", (RANKS,))
            self.state = {
                name: DTensor.from_local(tensor, mesh, [Shard(0)]) for name, tensor in self.local.items()
            }
        self._prepare_holdfast(rows)
        self._stager = DefaultStager(StagingOptions(False, True, False, False))
        self._kept.callback(self._stager.close)
        if "dlrover" in map(OPTIONAL.get, chosen):
            self._flash = Flash(self.rank, RANKS if self.sharded else 1, directory)
            self._kept.callback(self._flash.close)
        if "torch_checkpointing" in chosen:
            self._torch_checkpointing = TorchCheckpointing(self.rank, self.sharded)
            self._kept.callback(self._torch_checkpointing.close)
        self._warm = np.ones(SHARE_SIZE_BYTES, np.uint8)
        pages = mmap.mmap(-1, SHARE_SIZE_BYTES)
        self._pages = memoryview(pages)
        np.copyto(
            np.frombuffer(self._pages, np.uint8),
            np.random.default_rng(0).integers(0, 256, SHARE_SIZE_BYTES, np.uint8),
        )

    def _prepare_holdfast(self, rows: int) -> None:
        def held(rank: int) -> NumpyState:
            start = rank * rows if self.sharded else 0
            return NumpyState(
                Held(name, (ROWS, COLUMNS), Box((start, 0), (rows, COLUMNS)), tensor.numpy())
                for name, tensor in self.local.items()
            )

        layouts = {rank: held(rank).layout(rank, RANKS) for rank in range(RANKS)}
        self.catalogue = Catalogue.from_layouts(layouts)
        self.plan = plan(self.catalogue, frozenset(range(RANKS)))
        self.source = held(self.rank)
        self.step = 0
        self.done = threading.Event()
        self.results: list[WrittenShare | HoldfastError] = []
        self.saver = BackgroundSaver(self._saved).__enter__()
        self._kept.callback(self.saver.close)

    def _saved(self, _save_id: SaveId, result: WrittenShare | HoldfastError) -> None:
        self.results.append(result)
        self.done.set()

    def holdfast(self, where: Path) -> Begun:
        """Copy the state to shared memory and let the writer process write it."""
        self.step += 1
        self.done.clear()
        save_id = SaveId("bench", Generation(1, 1), self.step, 0, "periodic")
        self.saver.save(
            where, save_id, self.catalogue, self.plan, self.rank, self.source, {}, {self.rank: {}}
        )

        def wait() -> None:
            self.done.wait()
            result = self.results[-1]
            if not isinstance(result, WrittenShare):
                raise result

        return wait

    def memcpy(self, where: Path) -> Begun:
        """Measure the roof of the stall: copy what this rank has to save into warm memory, tensor by tensor."""
        offset = 0
        for item in self.plan.items(self.rank):
            start, stop = item.byte_range(4)
            data = np.frombuffer(self.source.view(item.fqn, item.box), np.uint8)[start:stop]
            np.copyto(self._warm[offset : offset + len(data)], data)
            offset += len(data)
        return nothing

    def _disk(self, where: Path, flags: int, early: bool) -> Begun:
        path = where / f"raw-{self.rank}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o600)
        for offset in range(0, SHARE_SIZE_BYTES, BLOCK_SIZE_BYTES):
            written = os.pwrite(fd, self._pages[offset : offset + BLOCK_SIZE_BYTES], offset)
            assert written == min(BLOCK_SIZE_BYTES, SHARE_SIZE_BYTES - offset)
            if early:
                os.posix_fadvise(fd, offset, written, os.POSIX_FADV_DONTNEED)
        os.fsync(fd)
        os.close(fd)
        return nothing

    def disk_plain(self, where: Path) -> Begun:
        """Measure a roof of the disk: write, then fsync."""
        return self._disk(where, 0, early=False)

    def disk_early(self, where: Path) -> Begun:
        """Measure a roof of the disk: write-back begins with each block."""
        return self._disk(where, 0, early=True)

    def disk_direct(self, where: Path) -> Begun:
        """Measure a roof of the disk: O_DIRECT."""
        return self._disk(where, os.O_DIRECT, early=False)

    def torch_save(self, where: Path) -> Begun:
        """Save with torch.save: each rank its shard, rank 0 alone a replicated state."""
        if self.sharded or self.rank == 0:
            path = where / f"{self.rank}.pt"
            torch.save(self.local, path)
            fsync(path)
        return nothing

    def safetensors(self, where: Path) -> Begun:
        """Save with safetensors: each rank its shard, rank 0 alone a replicated state."""
        if self.sharded or self.rank == 0:
            path = where / f"{self.rank}.safetensors"
            save_file(self.local, path)
            fsync(path)
        return nothing

    def dcp_save(self, where: Path) -> Begun:
        """Save with torch's distributed checkpoint, inside the step."""
        save_dcp(self.state, storage_writer=FileSystemWriter(str(where), sync_files=True))
        return nothing

    def dcp_async(self, where: Path) -> Begun:
        """Save with torch's distributed checkpoint in its fastest way: a background process and a kept stager."""
        future = async_save(
            self.state,
            storage_writer=FileSystemWriter(str(where), sync_files=True),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self._stager,
        )
        upload = future.upload_completion if isinstance(future, AsyncSaveResponse) else future
        return lambda: upload.result() and None

    def dlrover(self, where: Path) -> Begun:
        """Save with the flash checkpoint to disk. Rank 0 alone saves a replicated state."""
        return self._flash.save(self.local, where / f"{self.rank}.pt", "DISK")

    def dlrover_memory(self, where: Path) -> Begun:
        """Save with the flash checkpoint in shared memory, never to disk."""
        return self._flash.save(self.local, where / f"{self.rank}.pt", "MEMORY")

    def torch_checkpointing(self, where: Path) -> Begun:
        """Save one file per kind and rank.

        The library writes every copy that it gets, so rank 0 saves a replicated state.
        """
        items = {
            kind: {name: tensor for name, tensor in self.local.items() if name.startswith(f"{kind}.")}
            for kind in KINDS
        }
        return self._torch_checkpointing.save(items if self.sharded or self.rank == 0 else {}, where)

    def close(self) -> None:
        """Close everything that the contenders keep open."""
        self._kept.close()


ALL = (
    "memcpy", "disk_plain", "disk_early", "disk_direct",
    "holdfast", "dlrover_memory", "dlrover", "torch_checkpointing", "dcp_async",
    "dcp_save", "safetensors", "torch_save",
)  # fmt: skip
OPTIONAL = {
    "dlrover_memory": "dlrover", "dlrover": "dlrover", "torch_checkpointing": "torch_checkpointing",
}  # fmt: skip


def private_bytes(pid: int) -> int:
    """Return the anonymous memory of a process in bytes."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss_Anon:"))


def memory_of_a_save(ways: Contenders, where: Path) -> float:
    """Return the peak of the host memory that a first save needs beyond the state, as a share of the rank's bytes."""
    before = private_bytes(os.getpid())
    done = threading.Event()
    peak = 0
    with BackgroundSaver(lambda _save_id, _result: done.set()) as saver:
        save_id = SaveId("memory", Generation(1, 1), 1, 0, "periodic")
        saver.save(where, save_id, ways.catalogue, ways.plan, ways.rank, ways.source, {}, {ways.rank: {}})
        while not done.wait(0.01):
            own = private_bytes(os.getpid()) - before
            peak = max(peak, saver.pool_size_bytes + private_bytes(saver.writer_pid) + own)
    return peak / sum(tensor.numel() * 4 for tensor in ways.local.values())


def work(layout: str, reps: int, directory: Path, names: list[str]) -> None:
    """Run the benchmark as one rank. Rank 0 prints one JSON line."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ways = Contenders(layout, names, directory)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for rep in range(reps + 1):
        for name in names:
            where = directory / f"{name}-{rep}"
            if ways.rank == 0:
                where.mkdir(parents=True)
            dist.barrier()
            began_s = time.perf_counter()
            wait = getattr(ways, name)(where)
            stall_s = time.perf_counter() - began_s
            wait()
            durable_s = slowest(time.perf_counter() - began_s)
            times[name].append((slowest(stall_s), durable_s))
            if ways.rank == 0:
                shutil.rmtree(where)
            dist.barrier()
            time.sleep(0.2)
    extra = slowest(memory_of_a_save(ways, directory))
    ways.close()
    dist.barrier()
    if ways.rank == 0:
        print(
            "RESULT "
            + json.dumps({"layout": layout, "times": times, "memory": extra, "load": os.getloadavg()})
        )
    dist.destroy_process_group()


def report(result: dict[str, Any]) -> None:
    """Print the table of one layout, and the ratios of interest."""
    counted = {name: rounds[1:] for name, rounds in result["times"].items()}
    print(f"\n### {result['layout']} (load average at the end {result['load'][0]:.1f})\n")
    print("| seconds, slowest rank, min / median / max | the step waits | durable | first round |")
    print("|---|---|---|---|")
    for name, rounds in counted.items():
        stalls, ends = spread([r[0] for r in rounds]), spread([r[1] for r in rounds])
        first = result["times"][name][0]
        print(f"| {name} | {stalls} | {ends} | {first[0]:.2f}, {first[1]:.2f} |")
    stall: dict[str, float] = {
        name: statistics.median(r[0] for r in rounds) for name, rounds in counted.items()
    }
    durable = {name: statistics.median(r[1] for r in rounds) for name, rounds in counted.items()}
    disks = [name for name in ("disk_plain", "disk_early", "disk_direct") if name in durable]
    if not disks or "holdfast" not in durable:
        return
    best = min(disks, key=lambda name: durable[name])
    beside = "".join(
        f", {stall['holdfast'] / stall[name]:.2f} (durable {durable['holdfast'] / durable[name]:.2f}) x {name}"
        for name in ("dcp_async", "dlrover", "torch_checkpointing")
        if name in stall
    )
    print(
        f"\nStall {stall['holdfast'] / stall['memcpy']:.2f} x memcpy{beside}. "
        f"Disk rate reached: {durable.get('disk_plain', float('nan')) / durable['holdfast']:.2f} of write + fsync, "
        f"{durable[best] / durable['holdfast']:.2f} of the best ({best}, "
        f"{STATE_SIZE_BYTES / 1e9 / durable[best]:.2f} GB/s). "
        f"Peak extra memory {result['memory']:.3f} of the rank's bytes."
    )


def installed(names: list[str]) -> list[str]:
    """Return the names without the contenders that this environment lacks, and print a line that names those."""
    wanted = {OPTIONAL[name] for name in names if name in OPTIONAL}
    missing = sorted(package for package in wanted if importlib.util.find_spec(package) is None)
    if missing:
        print(f"Left out, not installed here: {', '.join(missing)}.")
    return [name for name in names if OPTIONAL.get(name) not in missing]


def main() -> None:
    """Start both runs, or work as one rank of a run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=["sharded", "replicated"])
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--only", default=",".join(ALL), help="contenders, in this order")
    parser.add_argument("--dir", type=Path, default=Path("bench-store"))
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        work(arguments.layout, arguments.reps, arguments.dir, arguments.only.split(","))
        return
    names = installed(arguments.only.split(","))
    for layout in [arguments.layout] if arguments.layout else ["sharded", "replicated"]:
        place = arguments.dir / layout
        shutil.rmtree(place, ignore_errors=True)
        command = [
            str(Path(sys.executable).parent / "torchrun"),
            "--standalone",
            "--nproc-per-node",
            str(RANKS),
        ]
        command += [
            __file__,
            "--layout",
            layout,
            "--reps",
            str(arguments.reps),
            "--dir",
            str(place),
            "--only",
            ",".join(names),
        ]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
        )
        shutil.rmtree(arguments.dir, ignore_errors=True)
        report(next(json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")))


if __name__ == "__main__":
    main()
