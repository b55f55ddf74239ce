"""Random kills of saving processes: ``python -m tests.store.soak --kills 1000`` (``make soak-store``).

With ``--s3`` they save to a server of objects on loopback, and the remains of killed processes are not removed.

Each trial is a job of two ranks that save one step after the other, as fast as they can, each through its own writer
process. The target of a kill at a random moment is one worker, one writer, a worker with its writer, both workers, or
all four processes. Then the other processes are ended, and the test waits for the writers. These must hold after every
trial:

1. The newest valid checkpoint loads, and every bit is that of its step: never a mixture.
2. It is not older than the newest step that was reported as sealed to any rank.
3. If no writer was killed, it is not older than the newest step that both ranks had handed over.
4. A killed writer is replaced: later saves of its worker succeed.
5. No process is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NoReturn

from holdfast.core.ids import Generation, SaveId
from holdfast.errors import HoldfastError
from holdfast.store.backends.location import Place, Url
from holdfast.store.layouts.save_plan import plan
from holdfast.store.manage.checkpoint_root import Root
from holdfast.store.read.load import load_into
from holdfast.store.write.async_save import BackgroundSaver
from holdfast.store.write.writer import WrittenShare
from tests.store import s3server
from tests.store.worlds import World, random_array, replicated

RANKS = 2
DELAY_S_MAX = 0.12
SLOWER = 5
"""Factor by which a save to a server may take longer than a save to a directory."""
BOUND_S = 60.0
TARGETS = ("worker", "writer", "worker and its writer", "both workers", "everything")
MARK = "HOLDFAST_SOAK_ROOT"
READY_STEP = 2
"""Number of saves that must be sealed before the first kill."""


def world_at(step: int) -> World:
    """Return the state after ``step`` updates. Two steps share an element only by accident."""
    arrays = {f"w{n}": random_array((300, 400), "float32", 10 * step + n) for n in range(3)}
    return replicated(RANKS, arrays)


def work(root: Place, rank: int, report: int) -> NoReturn:
    """Save and report for ever, as one rank.

    Reports are lines: ``writer PID``, ``staged STEP``, ``done STEP SEALED``.
    """

    def tell(*words: object) -> None:
        os.write(report, (" ".join(map(str, words)) + "\n").encode())

    def done(save_id: SaveId, result: WrittenShare | HoldfastError) -> None:
        if isinstance(result, HoldfastError):
            tell("failed", save_id.step, str(result).replace("\n", " "))
        else:
            tell("done", save_id.step, int(result.sealed))

    catalogue = world_at(0).catalogue()
    shares = plan(catalogue, frozenset(range(RANKS)))
    with BackgroundSaver(done) as saver:
        step = 0
        while True:
            step += 1
            save_id = SaveId("soak", Generation(1, 1), step, 0, "periodic")
            state = world_at(step).state(rank)
            saver.save(root, save_id, catalogue, shares, rank, state, {"step": step}, {rank: {}})
            tell("writer", saver.writer_pid)
            tell("staged", step)
            saver.wait()


class Rank:
    """A running worker and its reports so far."""

    def __init__(self, root: Place, rank: int) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.close(read)
            os.environ[MARK] = str(root)
            work(root, rank, write)
        os.close(write)
        os.set_blocking(read, False)
        self._read = read
        self._text = b""
        self.alive = True

    def lines(self) -> Iterator[list[str]]:
        """Yield all reports so far."""
        try:
            while data := os.read(self._read, 65536):
                self._text += data
        except BlockingIOError:
            pass
        for line in self._text.decode().splitlines(keepends=True):
            if line.endswith("\n"):
                yield line.split()

    def newest(self, word: str) -> int:
        """Return the last number after ``word``, or 0."""
        return max((int(line[1]) for line in self.lines() if line[0] == word), default=0)

    def newest_sealed(self) -> int:
        """Return the newest step that was reported as sealed to this rank."""
        return max((int(w[1]) for w in self.lines() if w[0] == "done" and w[2] == "1"), default=0)

    def writers(self) -> list[int]:
        """Return the process ids of its writers, in order."""
        return [int(line[1]) for line in self.lines() if line[0] == "writer"]

    def kill(self) -> None:
        """Kill and reap the worker. A second call does nothing."""
        if self.alive:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.alive = False

    def close(self) -> None:
        """Close the pipe of the reports."""
        os.close(self._read)


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    """Poll ``condition()``, faster than ``until`` of the other tests."""
    deadline_s = time.monotonic() + BOUND_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{what}: not within {BOUND_S:g} s")
        time.sleep(0.001)


def writers_of(root: Place) -> list[int]:
    """Return the writer processes of this trial, including any that replaced another just before their worker died."""
    mark, found = f"{MARK}={root}".encode(), []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found.append(int(entry))
        except OSError:
            continue  # the process has ended, or belongs to another user
    return found


def strike(target: str, ranks: list[Rank], draw: random.Random) -> None:
    """Kill the processes that the target names."""
    chosen = draw.choice(ranks)
    if target in ("writer", "worker and its writer", "everything"):
        for rank in ranks if target == "everything" else [chosen]:
            try:
                os.kill(rank.writers()[-1], signal.SIGKILL)
            except ProcessLookupError:
                continue
    if target in ("worker", "worker and its writer"):
        chosen.kill()
    if target in ("both workers", "everything"):
        for rank in ranks:
            os.kill(rank.pid, signal.SIGKILL)
        for rank in ranks:
            rank.kill()
    if target == "writer":
        before = chosen.newest("done")
        wait_for("the replaced writer continues", lambda: chosen.newest("done") >= before + 2)


@contextmanager
def fresh_root(server: str) -> Iterator[Place]:
    """Yield an empty root: a directory, or a bucket on the server at this URL, which drops everything else."""
    if server:
        s3server.reset(server)
        s3server.make_bucket(server, "soak")
        yield Url.parse(f"s3://soak/{secrets.token_hex(8)}")
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-soak-") as name:
        yield Path(name)


def trial(target: str, draw: random.Random, server: str) -> str:
    """Run one job and one kill. Returns the kind of state that was found."""
    with fresh_root(server) as root:
        ranks = [Rank(root, number) for number in range(RANKS)]
        try:
            wait_for("first saves", lambda: all(rank.newest("done") >= READY_STEP for rank in ranks))
            time.sleep(draw.uniform(0.0, DELAY_S_MAX * (SLOWER if server else 1)))
            strike(target, ranks, draw)
            for rank in ranks:
                rank.kill()
            wait_for("the writers leave", lambda: not writers_of(root))
            failed = [line for rank in ranks for line in rank.lines() if line[0] == "failed"]
            assert not failed, failed
            found = Root(root).newest_valid(deep=True).require()
            world = world_at(found.step)
            for number in range(RANKS):
                state = world.state(number, empty=True)
                load_into(found.path, state.targets())
                world.check(state)
            sealed = max(rank.newest_sealed() for rank in ranks)
            handed_over = min(rank.newest("staged") for rank in ranks)
            assert found.step >= sealed, f"step {sealed} was sealed, {found.step} is found"
            if "writer" not in target and target != "everything":
                assert found.step >= handed_over, f"step {handed_over} was handed over, {found.step} is found"
            # A kill may come between the handover of a save and its report.
            if found.step > handed_over:
                return "newer than reported"
            return "newest handed over" if found.step == handed_over else "an older one, exactly"
        finally:
            for rank in ranks:
                rank.kill()
                rank.close()


def lane(kills: int, seed: int, server: str) -> None:
    """Run trials one after the other, and print the counts as JSON."""
    os.environ.update(s3server.environment(server) if server else {})
    draw = random.Random(seed)
    counts: Counter[str] = Counter()
    for number in range(kills):
        target = TARGETS[number % len(TARGETS)]
        counts[f"{target}|{trial(target, draw, server)}"] += 1
    print(json.dumps(counts))


def main() -> None:
    """Run several series of trials in parallel, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--s3", action="store_true", help="save to a server of objects")
    parser.add_argument("--lane", type=int, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    seed = int(time.time()) if arguments.seed is None else arguments.seed
    if arguments.lane is not None:
        with s3server.server() if arguments.s3 else nullcontext("") as server:
            lane(arguments.kills, seed + arguments.lane, server)
        return
    began_s = time.monotonic()
    each = -(-arguments.kills // arguments.lanes)
    command = [sys.executable, "-m", "tests.store.soak", "--kills", str(each), "--seed", str(seed)]
    command += ["--s3", "--lane"] if arguments.s3 else ["--lane"]
    lanes = [
        subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE, text=True)
        for number in range(arguments.lanes)
    ]
    counts: Counter[str] = Counter()
    outputs = [one.communicate()[0] for one in lanes]
    if any(one.returncode for one in lanes):
        sys.exit(f"a trial failed (seed {seed}), see above")
    for output in outputs:
        counts.update(json.loads(output))
    found = sorted({key.partition("|")[2] for key in counts})
    print(f"| killed | trials | {' | '.join(found)} |\n|---|---|{'---|' * len(found)}")
    for target in TARGETS:
        row = [counts[f"{target}|{kind}"] for kind in found]
        print(f"| {target} | {sum(row)} | {' | '.join(map(str, row))} |")
    print(f"\n{sum(counts.values())} trials, none failed, seed {seed}, {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
