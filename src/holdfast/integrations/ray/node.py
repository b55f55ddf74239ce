"""The actor of one node: it holds the launcher, and reports the node's address, the exit code and the returned values.

Ray makes the actor again when its process or its node is lost. The new actor has no memory of the old one. It reads the
state from the files of the node (``keeper.py``), or gets it from the driver.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from holdfast.integrations.ray.keeper import LOCK_S, POLL_S, KeptPlace, Order, Owner
from holdfast.integrations.ray.rank import CONFIG, RETURNED
from holdfast.integrations.ray.shipped_function import TrainFunction, find_place
from holdfast.runtime.agent.peers import read_peers
from holdfast.runtime.net.addresses import endpoint, family_of
from holdfast.runtime.node.file_owners import doubt
from holdfast.runtime.node.process_info import start_ticks
from holdfast.runtime.node.rundir import RunDir, write_private

KEEPER_LOST = -9
STATUS_S = 30.0
CHUNK_SIZE_BYTES = 1 << 16


@dataclass(frozen=True)
class NodeOrder:
    """The order to a node: the command that its launcher runs. All nodes get the same order except for ``contacts``."""

    flags: tuple[str, ...]
    train: TrainFunction | str  # a string: the path of a script
    args: tuple[str, ...]
    directory: str  # the driver's working directory
    contacts: tuple[str, ...]  # addresses of other agents, through which the agent of the node joins
    token: str = field(repr=False)
    config: bytes | None


@dataclass(frozen=True)
class NodeHere:
    """The answer of an actor to the question whether it is up."""

    address: str  # IP address of its node
    contact: str  # address and a free port of the node
    runs: bool  # the actor has taken over the launcher of an earlier actor


class HoldfastNode:
    """The actor of one node of the job. All its methods may be called at the same time.

    Args:
        name: name of the job.
        number: number of this node.
        launch: id of the driver's call.
        run_dir: directory on the node for the runs of this user.
    """

    def __init__(self, name: str, number: int, launch: str, run_dir: str) -> None:
        import ray

        context = ray.get_runtime_context()
        self._name, self._number = name, number
        self._runs = Path(run_dir)
        self._run = RunDir(self._runs / f"{name}-node{number}")
        self._place = KeptPlace(self._runs / f"{name}-node{number}.ray")
        devices = context.get_accelerator_ids()
        self._owner = Owner(
            pid=os.getpid(),
            ticks=start_ticks(os.getpid()),
            launch=launch,
            ray_node=context.get_node_id(),
            devices=tuple(f"{kind}:{each}" for kind in sorted(devices) for each in devices[kind]),
        )
        self._address: str = ray.util.get_node_ip_address()
        self._runs_on = self._take_over()

    def __repr__(self) -> str:  # Ray puts this text before each line of output
        return f"{self._name} node{self._number}"

    def _take_over(self) -> bool:
        if not self._place.path.exists() or self._doubt():
            return False
        before = self._place.owner
        if before is None or not self._place.kept or not self._owner.succeeds(before):
            return False
        self._place.own(self._owner)
        return True

    def here(self) -> NodeHere:
        """Return the node's address, a free port, and whether this actor has taken over a launcher."""
        with socket.socket(family_of(self._address)) as probe:
            probe.bind((self._address, 0))
            contact = endpoint(self._address, probe.getsockname()[1])
        return NodeHere(self._address, contact, self._runs_on)

    def start(self, order: NodeOrder) -> str:
        """Start the launcher. Return the reason why it cannot be started; empty if it is started."""
        try:
            return self._prepare() or self._start(order)
        except OSError as error:
            return f"{error.filename or self._place.path}: {error.strerror}"

    def _prepare(self) -> str:
        """Make private directories, and wait until processes of an earlier call have left.

        Returns:
            The reason why this failed; empty if it succeeded.
        """
        self._place.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if why := self._doubt():
            return why
        while self._place.kept:
            owner = self._place.owner
            if owner is not None and owner.lives and owner.pid != os.getpid():
                return f"another job of the name {self._name} runs there (process {owner.pid})"
            time.sleep(POLL_S)  # the launcher of an earlier call saves and leaves
        for path in self._place.path.glob(f"{RETURNED}*"):
            path.unlink()
        return ""

    def _doubt(self) -> str:
        """Return why another user may have made the directories of this actor; empty if no other user did."""
        doubts = ((path, doubt(path)) for path in (self._runs, self._place.path))
        return next((f"{path} {why}" for path, why in doubts if why), "")

    def _start(self, order: NodeOrder) -> str:
        root, file = _located(order.train)
        root = os.path.normpath(os.path.join(order.directory, root)) if file else root
        here = os.getcwd()
        found = find_place(here, order.directory, root, file) if file else root
        if file and not found:
            return f"there is no file {os.path.join(root, file)} (working directory of the actor: {here})"
        if not Path(found).is_relative_to(here) and os.path.isdir(order.directory):
            here = order.directory
        token = self._place.path / "token"
        write_private(token, order.token.encode())
        (self._place.path / CONFIG).unlink(missing_ok=True)
        if order.config is not None:
            write_private(self._place.path / CONFIG, order.config)
        flags = ("--run-id", self._name, "--run-dir", str(self._runs), "--node-rank", str(self._number),
                 "--bind", self._address, "--rdzv-endpoint", ",".join(order.contacts),
                 "--token-file", str(token), *order.flags)  # fmt: skip
        command = (sys.executable, "-m", "holdfast", "run", *flags, *_target(order, found, self._place.path))
        self._place.own(self._owner)
        self._place.start(Order(command, here))
        return ""

    def wait(self) -> int:
        """Show the launcher's output until the launcher has ended. Return its exit code; -N if signal N ended it."""
        while True:
            ended, kept = self._place.code, self._place.kept
            self._show()
            if ended is not None:
                self._runs_on = False
                return ended
            if not kept and self._place.code is None:
                self._runs_on = False
                return KEEPER_LOST
            time.sleep(POLL_S)

    def _show(self) -> None:
        """Print the new whole lines of the launcher's output. A new actor continues where the last actor stopped."""
        mark = self._place.path / "shown"
        before = shown = int(mark.read_text()) if mark.exists() else 0
        with self._place.output.open("rb") as file:
            file.seek(shown)
            while data := file.read(CHUNK_SIZE_BYTES):
                whole = data.rpartition(b"\n")[0] or (data if len(data) == CHUNK_SIZE_BYTES else b"")
                if not whole:
                    break
                sys.stdout.write(whole.decode(errors="replace") + "\n")
                shown += len(whole) + (len(whole) < len(data))
                file.seek(shown)
        if shown != before:
            sys.stdout.flush()
            write_private(mark, str(shown).encode())

    def contacts(self, asks: int) -> tuple[str, ...]:
        """Return the addresses of all agents except the agent of node ``asks``; empty if this node has none."""
        try:
            known = read_peers(self._run)
            return tuple(endpoint(peer.host, peer.port) for peer in known if peer.node_id != f"node{asks}")
        except (OSError, msgspec.MsgspecError):
            return ()

    def leave(self) -> None:
        """Ask the launcher to save and leave. A second call asks it to end at once."""
        if self._place.path.exists() and self._place.kept:
            self._place.ask()

    def returned(self) -> dict[int, bytes]:
        """Return the encoded values that the ranks of this node have returned, by rank."""
        files = self._place.path.glob(f"{RETURNED}*")
        return {int(file.name.removeprefix(RETURNED)): file.read_bytes() for file in files}

    def status(self) -> dict[str, Any]:
        """Return the output of ``holdfast status --json`` on this node; empty if the run has no status yet."""
        asked = subprocess.run(
            [sys.executable, "-m", "holdfast", "status", "--json", str(self._run.path)],
            capture_output=True, text=True, timeout=STATUS_S, check=False,
        )  # fmt: skip
        said: dict[str, Any] = json.loads(asked.stdout) if asked.returncode == 0 else {}
        return said

    def clear(self) -> None:
        """Remove the files of this call, such as the token and the launcher's output."""
        until_s = time.monotonic() + LOCK_S
        while self._place.kept:  # the launcher has ended, and its keeper ends
            if time.monotonic() > until_s:
                return
            time.sleep(POLL_S)
        shutil.rmtree(self._place.path, ignore_errors=True)


def _located(train: TrainFunction | str) -> tuple[str, str]:
    """Return the directory of the code on the driver's node, and the path of a code file, relative to this directory.

    The path is empty if the code is an installed package.
    """
    if isinstance(train, TrainFunction):
        return train.root, train.file
    return os.path.split(train)


def _target(order: NodeOrder, found: str, place: Path) -> tuple[str, ...]:
    """Return the last words of the launcher's command, which name the function or script."""
    if isinstance(order.train, TrainFunction):
        module, name = order.train.module, order.train.name
        return ("-m", "holdfast.integrations.ray.rank", module, name, found, str(place))
    return (os.path.join(found, os.path.basename(order.train)), *order.args)
