"""One rank's side of ``mindio_ttp``: a thread that receives the controller's orders even while the training hangs.

Theory. The training thread calls :meth:`Processor.begin_update` (the *gate*) before each update, and reports when the
update is done. Once the controller orders a stop, the gate blocks. The thread of this module then waits until the
update in progress is complete, before it calls a handler. So the state does not change while a handler saves it.

Invariants:
1. After :class:`Stood` was sent no update begins, except updates up to a step that the controller names.
2. The save handler runs only while no update is in progress and none can begin. It gets the ordered step and the
   arguments that belong to that step (:mod:`holdfast.compat.step_state`).
3. A stopped process ends: by the controller's order, or because the controller is lost.
4. SIGTERM, if the script has no handler for it, is a fault like any other. It ends the process after the dying
   checkpoint. torchrun sends SIGTERM to the living workers as soon as one worker has died. At that time these workers
   write the dying checkpoint.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.compat.dying_checkpoint import (
    REACH_S,
    SAVE_S,
    STAND_S,
    TEXT_SIZE_MAX,
    Done,
    Faulted,
    Here,
    LeaveOrder,
    Rename,
    Renamed,
    Replicas,
    Saved,
    SaveParts,
    ShardGroup,
    Stood,
    Stop,
)
from holdfast.compat.endpoint import LINES, LOG_NAME, LOG_VARIABLE, ROLE, Message, make_token, token
from holdfast.compat.step_state import StepState
from holdfast.errors import AuthError, GroupError, ProtocolError, UsageError
from holdfast.runtime.net.addresses import Address
from holdfast.runtime.net.blocking_channel import BlockingChannel
from holdfast.runtime.net.service_names import TTP
from holdfast.runtime.node.rundir import open_log
from holdfast.sealing import Secret
from holdfast.session.exit_requests import ExitWatch

log = logging.getLogger("holdfast")

CONNECT_S = 60.0
UPDATE_S = STAND_S - 1  # limit of the wait for the update in progress; the controller waits 1 s longer
RETRY_S = 0.05


def start_controller(host: str, port: int, world_size: int) -> int:
    """Start the controller as a process that outlives this one. Return its pid.

    Raises:
        UsageError: other machines can reach the address and there is no secret, or the log cannot be written.
    """
    logged = os.environ.get(LOG_VARIABLE, LOG_NAME)
    try:
        os.close(open_log(Path(logged)))
    except OSError as error:
        raise UsageError(f"cannot write the log of the TTP controller, {logged}: {error.strerror}",
                         hint=f"{LOG_VARIABLE}=FILE names another one") from error  # fmt: skip
    secret = make_token(host, port)
    words = [
        sys.executable,
        "-m",
        "holdfast.compat.controllerd",
        host,
        str(port),
        str(world_size),
        str(secret),
        logged,
    ]
    # No Popen: no process waits for this one, which ends after all ranks.
    null = os.open(os.devnull, os.O_RDWR)
    try:
        return os.posix_spawn(
            sys.executable, words, {**os.environ, "MS_ENABLE_TFT": ""}, setsid=True,
            file_actions=[(os.POSIX_SPAWN_DUP2, null, fd) for fd in (0, 1, 2)],
        )  # fmt: skip
    finally:
        os.close(null)


def end_by_sigterm() -> None:
    """End this process as SIGTERM does without a handler.

    This function restores the default action with C's ``signal``, because Python can set handlers only in the main
    thread.
    """
    ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(int(signal.SIG_DFL)))
    os.kill(os.getpid(), signal.SIGTERM)


class Processor:
    """One rank's side of the protocol; the module docstring states its rules.

    Args:
        rank, world_size: rank of this process and number of ranks.
        call: calls the handler that is registered under the given name, for the given order.
        standing: the step of this rank's state, and the arguments of the save handler.
    """

    def __init__(
        self, rank: int, world_size: int, call: Callable[[str, Message], None], standing: StepState
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._standing = standing
        self._call = call
        self._changed = threading.Condition()
        self._torn = False  # an exception has left a state that is in the middle of an update
        self._limit: int | None = None  # no update beyond this step begins; None: no limit
        self._reported = False
        self._left = False
        self._deaf = False  # the controller is lost, and the job was not stopped before
        self._ending = False  # SIGTERM has come
        self._channel: BlockingChannel[Message] | None = None
        # The process stays as long as the controller waits for a save. A launcher that waits less (torchrun: 30 s)
        # sends SIGKILL.
        self._watch = ExitWatch(self._asked, None, SAVE_S, end_by_sigterm, signals=(signal.SIGTERM,))
        self._handler: object = signal.SIG_DFL
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ life

    def start(self, host: str, port: int) -> None:
        """Connect to the controller, and receive its orders in a thread.

        Raises:
            GroupError: no controller answers within ``CONNECT_S`` seconds.
        """
        deadline_s = time.monotonic() + CONNECT_S
        while True:
            try:
                self._channel = BlockingChannel.connect(
                    LINES, Address(host, port), Secret(token(host, port)), TTP, ROLE
                )
                break
            except (OSError, AuthError, ProtocolError) as error:
                # The controller of an earlier job may still be there, with another secret.
                if time.monotonic() > deadline_s:
                    raise GroupError(f"no TTP controller at {host}:{port} within {CONNECT_S:g} s: {error}",
                                     hint="rank 0 starts it: tft_start_controller(...)") from error  # fmt: skip
            time.sleep(RETRY_S)
        self._channel.send(Here(rank=self.rank, world_size=self.world_size, pid=os.getpid()))
        self._thread = threading.Thread(target=self._listen, name="holdfast-ttp", daemon=True)
        self._thread.start()
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            with self._changed:  # a signal may come at once: the lock lets _asked() wait for _handler
                self._watch.start()
                self._handler = signal.getsignal(signal.SIGTERM)

    def close(self) -> None:
        """Report that the training is over and disconnect, after a dying checkpoint in progress has ended."""
        with self._changed:
            if self._left:
                return
            self._left = self._limit is None and not self._ending
        if not self._left and threading.current_thread() is not self._thread:
            self.wait_end()
        self._watch.stop()
        self._tell(Done(rank=self.rank))
        if self._channel is not None:
            self._channel.close()

    # ------------------------------------------------------------------ the training thread

    def hold(self, groups: tuple[ShardGroup, ...]) -> None:
        """Report which ranks hold the same state as this rank."""
        self._tell(Replicas(rank=self.rank, groups=groups))

    def begin_update(self) -> None:
        """Block before the weights change if the controller has ordered a stop. Updates up to the ordered step pass."""
        with self._changed:
            while self._limit is not None and (self._standing.open or self._standing.step >= self._limit):
                self._changed.wait()
            forgotten = self._standing.begin()
        if forgotten:
            log.error(
                "holdfast: an update begins, and ttp_set_ckpt_args was not called since the one before: "
                "no dying checkpoint can be made of a step without it"
            )

    def end_update(self, step: int) -> None:
        """Record that an update has ended: the weights are now those of ``step``."""
        with self._changed:
            self._standing.end(step)
            self._changed.notify_all()

    def give(self, arguments: Any) -> None:
        """Set the arguments of the save handler.

        While the job is being stopped, block instead of replacing the arguments that belong to a complete state.
        """
        with self._changed:
            while (
                self._limit is not None
                and self._standing.moves(arguments)
                and self._standing.step >= self._limit
            ):
                self._changed.wait()
            self._standing.give(arguments)
            self._changed.notify_all()

    def fault(self, what: str) -> None:
        """Report that an exception has ended the training."""
        with self._changed:
            if self._reported or self._left:
                return
            self._reported = True
            self._torn = self._standing.updating or self._standing.open
        self._tell(Faulted(rank=self.rank, what=what[:TEXT_SIZE_MAX]))

    def wait_end(self) -> None:
        """Wait until the process ends after the exit handler. Return only if the controller is lost."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(RETRY_S)

    # ------------------------------------------------------------------ the thread that sees signals

    def _asked(self, source: str) -> None:
        with self._changed:
            if signal.getsignal(signal.SIGTERM) != self._handler:
                return  # the script has set its own handler meanwhile
            self._ending = held = not self._left and not self._deaf
        if held:
            log.warning("holdfast: %s: rank %d leaves after the dying checkpoint", source, self.rank)
            self._tell(Faulted(rank=self.rank, what=f"it was asked to leave: {source}"))
            with self._changed:
                self._changed.wait_for(lambda: self._deaf or self._limit is not None, STAND_S)
                held = self._limit is not None
        if not held:
            end_by_sigterm()

    # ------------------------------------------------------------------ the listening thread

    def _listen(self) -> None:
        assert self._channel is not None
        while True:
            try:
                message = self._channel.receive()
            except (OSError, ProtocolError) as error:
                if self._left:
                    return
                if self._limit is not None:  # the job was stopped by a fault, and has no controller now
                    self._exit(
                        LeaveOrder(
                            step=self._standing.step,
                            saved=False,
                            reason=f"the TTP controller is lost: {error}",
                        )
                    )
                log.error("holdfast: the TTP controller is lost (%s): no dying checkpoint from now on", error)
                with self._changed:
                    self._deaf = True
                    self._changed.notify_all()
                return
            match message:
                case Stop():
                    self._stop(message)
                case SaveParts():
                    self._save(message)
                case Rename():
                    self._tell(Renamed(rank=self.rank, why=self._try("rename", message)))
                case LeaveOrder():
                    self._exit(message)
                    return
                case _:
                    log.error("holdfast: the TTP controller sent a %s", type(message).__name__)

    def _stop(self, order: Stop) -> None:
        deadline_s = time.monotonic() + (UPDATE_S if order.step < 0 else REACH_S)
        with self._changed:
            self._limit = order.step
            self._changed.notify_all()
            while (
                (self._standing.updating or self._standing.open or self._standing.step < order.step)
                and time.monotonic() < deadline_s
                and not self._torn
            ):
                self._changed.wait(RETRY_S)
            why = self._standing.why
        why = why or self._try("stop", order)
        self._tell(Stood(rank=self.rank, step=self._standing.step, why=why))

    def _save(self, order: SaveParts) -> None:
        with self._changed:
            moved = not self._standing.whole or self._standing.step != order.step
            if not moved:
                self._limit = order.step  # the limit may have been a later step
        why = f"the rank is at step {self._standing.step}" if moved else self._try("save", order)
        self._tell(Saved(rank=self.rank, step=order.step, why=why))

    def _exit(self, order: LeaveOrder) -> None:
        saved = (
            f"a checkpoint of step {order.step} is saved"
            if order.saved
            else f"nothing is saved: {order.reason}"
        )
        log.error("holdfast: the training ends: %s", saved)
        self._try("exit", order)
        if self._ending:
            end_by_sigterm()
        os._exit(1)

    def _try(self, name: str, order: Message) -> str:
        """Call the handler registered under ``name``. Return its exception as text; empty if there was none."""
        try:
            self._call(name, order)
        except Exception as error:
            log.exception("holdfast: the %s handler failed", name)
            return f"{type(error).__name__}: {error}"[:TEXT_SIZE_MAX]
        return ""

    def _tell(self, message: Message) -> None:
        if self._channel is None:
            raise UsageError(
                "the TTP processor was not started", hint="tft_start_processor, ttp_start_processor"
            )
        try:
            self._channel.send(message)
        except OSError as error:
            log.error("holdfast: the TTP controller is lost (%s): no dying checkpoint from now on", error)
