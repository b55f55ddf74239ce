"""The keeper of one node's launcher: a separate process that outlives the actor of the node.

Theory. An actor is a process of Ray. It may be killed while the node is healthy: by an out-of-memory monitor, by a
command, by a defect. The training must not depend on the actor. So the launcher is a child of the keeper. A file with
an actor's process number says which actor owns the keeper. A new actor on the same node that finds the keeper writes
its own number into the file, and the training continues undisturbed. A keeper without a living owner asks the launcher
to save and leave, because for Ray the job is over, and the resources of the node go to other jobs.

Invariants:
1. There is one keeper per directory (a lock), and it ends after its launcher.
2. If a keeper is killed, its launcher is killed, and the launcher's agent then saves and leaves.
3. The loss of the owner causes one request to leave, and so does each signal to the keeper.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import msgspec

from holdfast.runtime.node.process_info import start_ticks
from holdfast.runtime.node.rundir import is_free, open_log, try_lock, write_private

POLL_S = 0.1
LOCK_S = 5.0
ORPHAN_S = 8.0  # wait for a new owner; Ray makes a new actor within two seconds, on a busy machine later
PR_SET_PDEATHSIG = 1  # of prctl(2)


class Order(msgspec.Struct, frozen=True):
    """The command that a keeper starts, and its working directory."""

    command: tuple[str, ...]
    directory: str


class Owner(msgspec.Struct, frozen=True):
    """The actor that owns a keeper."""

    pid: int
    ticks: int  # start time of the process, because process numbers are reused
    launch: str  # id of the driver's call
    ray_node: str
    devices: tuple[str, ...]  # devices that Ray has given to the actor

    @property
    def lives(self) -> bool:
        """True if the actor's process lives."""
        return start_ticks(self.pid) == self.ticks

    def succeeds(self, other: Owner) -> bool:
        """Return whether this actor may take over the launcher of the owner ``other``."""
        return (self.launch, self.ray_node, self.devices) == (other.launch, other.ray_node, other.devices)


class KeptPlace:
    """A private directory with the files by which a Ray actor and the keeper of its node's launcher find each other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.output = path / "output"
        self.lock = path / "lock"
        self.code_file = path / "code"

    @property
    def kept(self) -> bool:
        """True if a keeper of this directory lives."""
        return not is_free(self.lock)

    @property
    def code(self) -> int | None:
        """The exit code of the launcher; None if the launcher has not ended."""
        try:
            return int(self.code_file.read_text())
        except FileNotFoundError:
            return None

    @property
    def owner(self) -> Owner | None:
        """The owner of the keeper; None if the keeper never had an owner."""
        try:
            return msgspec.json.decode((self.path / "owner").read_bytes(), type=Owner)
        except FileNotFoundError:
            return None

    def own(self, owner: Owner) -> None:
        """Record ``owner`` as the owner of the keeper."""
        write_private(self.path / "owner", msgspec.json.encode(owner))

    def start(self, order: Order) -> None:
        """Start a keeper that executes ``order``. No other keeper of this directory may live."""
        self.code_file.unlink(missing_ok=True)
        write_private(self.path / "order", msgspec.json.encode(order))
        with os.fdopen(open_log(self.output), "ab") as output:
            subprocess.run(
                [sys.executable, "-m", "holdfast.integrations.ray.keeper", str(self.path)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, check=True,
            )  # fmt: skip

    def ask(self) -> None:
        """Ask the launcher, through its keeper, to save and leave."""
        pid = int((self.path / "keeper").read_text())
        if self.kept:
            os.kill(pid, signal.SIGTERM)


class Keeper:
    """The keeper of one launcher. It runs the launcher, and asks the launcher to leave when the owner is lost."""

    def __init__(self, place: KeptPlace) -> None:
        self.place = place
        self.requests = 0
        self._passed_on = 0
        self._owned_s = time.monotonic()
        self._orphan = False

    def run(self) -> None:
        """Start the launcher, and return after the launcher has ended."""
        signal.signal(signal.SIGTERM, self._asked)
        order = msgspec.json.decode((self.place.path / "order").read_bytes(), type=Order)
        libc, keeper = ctypes.CDLL(None), os.getpid()

        def end_with_keeper() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:  # the keeper has died before prctl()
                os.kill(os.getpid(), signal.SIGKILL)

        launcher = subprocess.Popen(order.command, cwd=order.directory, preexec_fn=end_with_keeper)
        while launcher.poll() is None:
            self._look()
            while self._passed_on < self.requests:
                self._passed_on += 1
                launcher.send_signal(signal.SIGTERM)
            time.sleep(POLL_S)
        write_private(self.place.code_file, str(launcher.returncode).encode())

    def _asked(self, _number: int, _frame: FrameType | None) -> None:
        self.requests += 1

    def _look(self) -> None:
        owner, now_s = self.place.owner, time.monotonic()
        if owner is not None and owner.lives:
            self._owned_s = now_s
        elif now_s - self._owned_s > ORPHAN_S and not self._orphan:
            self._orphan = True
            self.requests = max(1, self.requests)


def main() -> None:
    """Start the keeper of a directory, for ``python -m holdfast.integrations.ray.keeper DIRECTORY``.

    The command returns when the keeper, a background process, holds the lock.
    """
    place = KeptPlace(Path(sys.argv[1]))
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        os.read(reading, 1)  # until the keeper holds the lock, or has ended
        os._exit(0)
    os.close(reading)
    os.setsid()
    held, until_s = try_lock(place.lock), time.monotonic() + LOCK_S
    while held is None:  # an actor that checks the lock holds it for a moment
        if time.monotonic() > until_s:
            return
        time.sleep(POLL_S)
        held = try_lock(place.lock)
    write_private(place.path / "keeper", str(os.getpid()).encode())
    os.close(writing)
    Keeper(place).run()


if __name__ == "__main__":
    main()
