"""Work of the ranks of ``test_groups_faults.py`` while one of them dies or stops."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from holdfast.core.ids import Generation
from holdfast.errors import FaultError, GroupError, PeerLost, StepError, UnsupportedError
from holdfast.frameworks.torch.comm.comm_state import fabric
from holdfast.frameworks.torch.comm.control_store import ControlStore
from holdfast.frameworks.torch.comm.gloo_abort import Recorder
from holdfast.frameworks.torch.comm.group_builder import BuiltGroup
from holdfast.frameworks.torch.state.wrapper_reset import heal, rehearsals_needed
from holdfast.runtime.worker.worker_client import WorkerClient
from tests.adapters.features import digest
from tests.adapters.worlds import Line, Order, Say

SIZE = 64
LIMIT = timedelta(seconds=300)
"""A time-out longer than any test: a collective that waits for it was not interrupted."""


def _value(rank: int, turn: int) -> float:
    return float(turn % 100 + rank + 1)


def _all_reduce(rank: int, size: int, turn: int, numel: int) -> tuple[Tensor, Tensor]:
    x = torch.full((numel,), _value(rank, turn))
    dist.all_reduce(x)
    return x, torch.full_like(x, sum(_value(r, turn) for r in range(size)))


def _reduce_scatter(rank: int, size: int, turn: int, numel: int) -> tuple[Tensor, Tensor]:
    x = torch.empty(numel)
    dist.reduce_scatter_tensor(x, torch.full((numel * size,), _value(rank, turn)))
    return x, torch.full_like(x, sum(_value(r, turn) for r in range(size)))


def _all_gather(rank: int, size: int, turn: int, numel: int) -> tuple[Tensor, Tensor]:
    x = torch.empty(numel * size)
    dist.all_gather_into_tensor(x, torch.full((numel,), _value(rank, turn)))
    return x, torch.tensor([_value(r, turn) for r in range(size)]).repeat_interleave(numel)


def _broadcast(rank: int, size: int, turn: int, numel: int) -> tuple[Tensor, Tensor]:
    x = torch.full((numel,), _value(rank, turn))
    dist.broadcast(x, turn % size)
    return x, torch.full_like(x, _value(turn % size, turn))


def _all_to_all(rank: int, size: int, turn: int, numel: int) -> tuple[Tensor, Tensor]:
    x = torch.empty(numel * size)
    dist.all_to_all_single(x, torch.full((numel * size,), _value(rank, turn)))
    return x, torch.tensor([_value(r, turn) for r in range(size)]).repeat_interleave(numel)


def _ring(rank: int, size: int, turn: int, numel: int) -> tuple[Tensor, Tensor]:
    x = torch.empty(numel)
    sent = dist.isend(torch.full((numel,), _value(rank, turn)), (rank + 1) % size)
    dist.recv(x, (rank - 1) % size)
    assert sent is not None
    sent.wait()
    return x, torch.full_like(x, _value((rank - 1) % size, turn))


def _barrier(rank: int, size: int, turn: int, numel: int) -> tuple[Tensor, Tensor]:
    dist.barrier()
    return torch.zeros(1), torch.zeros(1)


def _future(rank: int, size: int, turn: int, numel: int) -> tuple[Tensor, Tensor]:
    x = torch.full((numel,), _value(rank, turn))
    try:
        dist.all_reduce(x, async_op=True).get_future().wait()
    except RuntimeError as error:  # a future's error crosses C++, where its type is lost; its text names it
        if "PeerLost: " not in str(error):
            raise
        raise PeerLost(str(error)) from error
    return x, torch.full_like(x, sum(_value(r, turn) for r in range(size)))


OPERATIONS: dict[str, Callable[[int, int, int, int], tuple[Tensor, Tensor]]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "ring": _ring,
    "barrier": _barrier,
    "future": _future,
}


def _push(line: Line) -> list[float]:
    """Poison the groups when the server orders a fence. Return the list to which the moment is appended."""
    told: list[float] = []

    def fence(order: Order) -> None:
        told.append(time.monotonic())
        fabric().poison(f"rank {order.number} is gone")

    line.orders["fence"] = fence
    line.orders["stopped"] = fence
    return told


def lose_a_peer(
    line: Line, operation: str, victim: int, how: str, numel: int, shield: bool, seed: int, idle: bool = False
) -> dict[str, Any]:
    """Repeat an operation until the victim is killed (``how`` = kill) or stopped at a random moment inside it.

    Returns: ``turns`` that were done correctly, ``end`` (how this rank left), ``out_ms`` (milliseconds after the
        order), and how the poisoned process answers another call.
    """
    told = _push(line)
    dist.init_process_group("gloo", timeout=LIMIT)
    _all_built(line)
    state = fabric()
    state.shield(shield)
    run = OPERATIONS[operation]
    turns, end = 0, "poisoned"
    try:
        run(line.rank, line.world_size, 0, numel)  # the victim may finish the operation before the others do
        if line.rank == victim:
            delay_s = random.Random(seed).uniform(0.0, 0.03)
            threading.Timer(delay_s, lambda: line.say(Say("kill-me" if how == "kill" else "stop-me"))).start()
        while True:
            turns += 1
            if idle and line.rank == victim:
                time.sleep(60)
            result, expected = run(line.rank, line.world_size, turns, numel)
            if state.poisoned:
                break
            assert torch.equal(result, expected), f"success with wrong data in turn {turns}"
    except PeerLost:
        end = "PeerLost"
    out = time.monotonic()
    again = "completed"
    try:
        run(line.rank, line.world_size, 0, numel)
    except PeerLost:
        again = "PeerLost"
    assert state.quiesce()
    return {"turns": turns, "end": end, "again": again, "out_ms": (out - told[0]) * 1e3 if told else None}


def _all_built(line: Line, what: str = "built") -> None:
    """Wait until every rank has built its groups. Without this, a fault could hit a rank that is still building."""
    line.kv("set", (f"{what}/{line.rank}",), b"yes")
    assert line.kv("wait", tuple(f"{what}/{rank}" for rank in range(line.world_size))).ok


def answers_when_poisoned(line: Line) -> dict[str, str]:
    """Return all answers of a poisoned or sealed process, and those of loopback and of programming errors."""
    dist.init_process_group("gloo")
    state = fabric()
    seen: list[str] = []
    state.on_poison(seen.append)
    found: dict[str, str] = {}

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            found[name] = repr(call())
        except BaseException as error:
            found[name] = type(error).__name__

    def gather() -> list[Any]:
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, line.rank)
        return everyone

    def listen() -> list[Any]:
        box: list[Any] = ["mine"]
        dist.broadcast_object_list(box, 1 - line.rank)
        return box

    attempt("wrong sizes", lambda: dist.all_gather_into_tensor(torch.empty(3), torch.ones(2)))
    attempt("wrong type", lambda: dist.all_reduce("text"))
    attempt("vote", lambda: state.reduce_vote([1, line.rank]))
    found["sound after bugs"] = repr(not state.poisoned)
    state.loopback()
    attempt("loopback vote", lambda: state.reduce_vote([1]))
    attempt("loopback gather", gather)
    attempt("loopback broadcast", listen)
    state.reconfigure(state.generation)
    attempt("live again", lambda: state.reduce_vote([1]))
    state.seal_updates(True)
    attempt("sealed", lambda: dist.all_reduce(torch.ones(1)))
    attempt("sealed vote", lambda: state.reduce_vote([1]))
    state.seal_updates(False)
    state.poison("first")
    state.poison("second")
    attempt("outside", lambda: dist.all_reduce(torch.ones(1)))
    attempt("outside objects", gather)
    state.shield(True)
    attempt("inside", lambda: dist.all_reduce(torch.ones(1)))
    attempt("inside objects", gather)
    attempt("poisoned vote", lambda: state.reduce_vote([1]))
    found["reason"] = state.reason
    found["reports of own poison"] = repr(seen)
    attempt("same generation", lambda: state.reconfigure(state.generation))
    attempt("next generation", lambda: state.reconfigure(Generation(1, 2)))
    attempt("sound", gather)
    return found


def second_fault(line: Line) -> dict[str, str]:
    """Rebuild rank 0 while rank 1 does not come. Another fault ends the attempt, and the next generation works."""
    dist.init_process_group("gloo")
    dist.new_group([0, 1])
    _all_built(line)
    state = fabric()
    state.poison("first")
    found = {}
    if line.rank == 0:
        threading.Timer(0.3, lambda: state.poison("second fault")).start()
        try:
            state.reconfigure(Generation(1, 2))
        except GroupError as error:
            found["stopped"] = str(error)
        found["poisoned"] = repr(state.poisoned)
    state.reconfigure(Generation(1, 3))
    x = torch.ones(1)
    dist.all_reduce(x)
    found["sum"] = repr(x.item())
    return found


def lost_while_connecting(line: Line, victim: int, how: str) -> str:
    """Lose a victim that has published its address and has not connected. The others get the order a second later.

    Returns: how the rebuilding of the others ended.
    """
    dist.init_process_group("gloo", timeout=LIMIT)
    _all_built(line)
    state = fabric()
    state.poison("first")
    if line.rank == victim:

        def gone(self: ControlStore, key: str) -> bytes:
            line.say(Say("kill-me" if how == "kill" else "stop-me"))
            time.sleep(60)
            return b""

        ControlStore.get = gone  # type: ignore[method-assign]  # gloo's first question about the others
    else:
        threading.Timer(1.0, lambda: state.poison(f"rank {victim} is gone")).start()
    try:
        state.reconfigure(Generation(1, 2))
    except GroupError as error:
        return str(error)
    return "rebuilt"


def rebuilt_often(line: Line, generations: int) -> list[list[int]]:
    """Break and rebuild two groups and the group of the vote again and again.

    Returns: descriptors and threads of this process in each generation, after a while in which other threads may end.
    """
    gc.disable()  # the collector of cycles may run late
    dist.init_process_group("gloo", timeout=LIMIT)
    dist.new_group()
    state = fabric()
    state.shield(True)
    _ring(line.rank, line.world_size, 0, SIZE)  # from then on, a thread of gloo waits for messages
    found: list[list[int]] = []
    for number in range(1, generations + 1):
        state.reduce_vote([1])
        _all_built(line, f"voted-{number}")
        deadline_s = time.monotonic() + 5.0
        while found and _held() != found[0] and time.monotonic() < deadline_s:
            time.sleep(0.01)
        found.append(_held())
        _all_built(line, f"counted-{number}")
        _break_off(line, f"begun-{number}")
        state.reconfigure(Generation(1, number + 1))
    return found


def _break_off(line: Line, moment: str) -> None:
    """Inject the fault while all ranks but rank 0 wait for it in a collective."""
    works = []
    if line.rank > 0:
        works = [dist.all_reduce(torch.ones(SIZE), async_op=True), dist.irecv(torch.ones(SIZE), 0)]
    _all_built(line, moment)
    fabric().poison("again")
    for work in works:
        assert work is not None
        work.wait()


def waited_for_later(line: Line, when: str) -> dict[str, str]:
    """Begin communication in rank 0 that rank 1 never joins, lose the generation, and wait only in the next one.

    Args:
        when: the moment of the wait: in the next block, or between two blocks.

    Returns: what each wait said, and whether the process still takes part.
    """
    dist.init_process_group("gloo", timeout=LIMIT)
    _all_built(line)
    state = fabric()
    waits: dict[str, Callable[[], Any]] = {}
    if line.rank == 0:
        received = dist.irecv(torch.ones(SIZE), 1)
        reduced, awaited, resolved = (dist.all_reduce(torch.ones(SIZE), async_op=True) for _ in range(3))
        assert received and reduced and awaited and resolved
        waits = {
            "recv": received.wait,
            "all_reduce": reduced.wait,
            "again": awaited.wait,
            "future": resolved.get_future().wait,
        }
    state.shield(when == "block")
    _all_built(line, "begun")
    state.poison("rank 1 is gone")
    if waits:
        with suppress(FaultError, StepError):  # the block in which the fault comes is not committed
            waits["again"]()
    assert state.quiesce()
    state.shield(False)
    state.reconfigure(Generation(1, 2))
    state.shield(when == "block")
    found = {}
    for name, wait in waits.items():
        try:
            found[name] = f"returned {wait()}"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    x = torch.ones(1)
    dist.all_reduce(x)
    found["sum"] = repr(x.item())
    return found


def written_after_quiesce(line: Line, trials: int) -> int:
    """Poison rank 0 in the middle of large messages that it never waits for.

    Returns: how often the memory of a message has changed after ``quiesce()``.
    """
    dist.init_process_group("gloo", timeout=LIMIT)
    state, changed = fabric(), 0
    for number in range(1, trials + 1):
        _all_built(line, f"built-{number}")
        message = torch.full((30_000_000,), float(line.rank))
        work = dist.irecv(message, 1) if line.rank == 0 else dist.isend(message, 0)
        assert work is not None
        if line.rank == 0:
            while not message[0]:
                pass
            state.poison("again")
            assert state.quiesce()
            at_once = message[::4096].clone()
            time.sleep(0.2)
            changed += not torch.equal(at_once, message[::4096])
        _all_built(line, f"looked-{number}")
        if line.rank == 1:
            state.poison("again")
        state.quiesce()
        state.reconfigure(Generation(1, number + 1))
    return changed


def _held() -> list[int]:
    return [len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")]


def buried_in_a_wait(line: Line) -> list[bool]:
    """Bury a group while a thread of gloo still waits in it for a peer.

    Returns: whether nothing was left of the group, first at its burial and then after the wait had ended.
    """
    dist.init_process_group("gloo", timeout=LIMIT)
    _all_built(line)
    found: list[bool] = []
    if line.rank == 0:
        (inner,) = cast(list[BuiltGroup], fabric()._inners())
        endpoints, inner._endpoints = inner._endpoints, []
        inner.group.allreduce([torch.ones(SIZE)], dist.AllreduceOptions())
        fabric().bury(inner)
        found.append(inner.buried(0.1))
        for each in endpoints:
            each.shutdown()
        found.append(inner.buried(20.0))
    _all_built(line, "looked")
    return found


def no_control_plane(line: Line, path: str) -> str:
    """Reconfigure in a process that has no client of the control plane, and return the error."""
    WorkerClient._current = None
    dist.init_process_group("gloo", store=FileStore(path, 1), rank=0, world_size=1)
    fabric().poison("test")
    try:
        fabric().reconfigure(Generation(1, 2))
    except GroupError as error:
        return str(error)
    return "rebuilt"


def builtin_hook(line: Line) -> str:
    """Return the error with which DDP's C++ hooks are refused by name."""
    dist.init_process_group("gloo")
    model = DDP(nn.Linear(2, 2))
    try:
        register: Callable[[Any], None] = model._register_builtin_comm_hook
        register(torch._C._distributed_c10d.BuiltinCommHookType.ALLREDUCE)
    except UnsupportedError as error:
        return str(error)
    return "accepted"


def buffers_of_the_group(line: Line) -> str:
    """Return the error of FSDP2 when it is to take its buffers from the communicator."""
    dist.init_process_group("gloo")
    model = fully_shard(nn.Linear(2, 2))
    model.set_allocate_memory_from_process_group_for_comm(False)
    try:
        model.set_allocate_memory_from_process_group_for_comm(True)
    except UnsupportedError as error:
        return str(error)
    return "accepted"


def foreign_socket(line: Line) -> dict[str, int]:
    """Check that a connection which other code opens while gloo connects is not counted as gloo's."""
    store = ControlStore(line, "foreign/")
    with socket.create_server(("127.0.0.1", 0)) as server, Recorder() as recorder:
        backend = dist.ProcessGroupGloo(store, line.rank, line.world_size, LIMIT)
        mine = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    endpoints = recorder.endpoints(store, line.rank, line.world_size)
    count = len(endpoints)
    endpoints.shutdown()
    mine.sendall(b"alive")
    received = accepted.recv(5)
    endpoints.close()
    del backend
    return {"gloo": count, "received": len(received)}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def replaced(line: Line, victim: int, kill_at: int, steps: int) -> dict[str, Any]:
    """Train with DDP and a vote. The victim is killed before its vote of ``kill_at`` and replaced by a new process."""
    told = threading.Event()

    def fence(order: Order) -> None:
        fabric().poison(f"rank {order.number} is gone")
        told.set()

    line.orders["fence"] = fence
    state = fabric()
    newcomer = line.generation != Generation(1, 1)
    if newcomer:
        state.loopback()  # groups, DDP and the rehearsal need no peers
    dist.init_process_group("gloo", timeout=LIMIT)
    torch.manual_seed(0)
    model = DDP(Small(), bucket_cap_mb=0.003)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def backward(step: int) -> None:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step * 10 + line.rank))
        (model(x) ** 2).mean().backward()

    def share() -> int:
        """Broadcast step, weights and momenta from a survivor to all. Return the step."""
        source = (victim + 1) % line.world_size
        step_now = torch.tensor([step])
        dist.broadcast(step_now, source)
        for p in model.parameters():
            momentum = optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            dist.broadcast(p.detach(), source)
            dist.broadcast(momentum, source)
        return int(step_now.item())

    step = 0
    if newcomer:
        while rehearsals_needed(model):
            backward(0)
            heal(model)
        state.reconfigure(state.generation)
        heal(model)
        step = share()
    while step < steps:
        state.shield(True)
        backward(step)
        if line.rank == victim and step == kill_at and not newcomer:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            passed = state.reduce_vote([0 if state.poisoned else 1])[0] == line.world_size
        except PeerLost:
            passed = False
        state.shield(False)
        if passed:
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            continue
        assert told.wait(20)
        state.quiesce()
        heal(model)
        state.reconfigure(Generation(1, 2))
        assert share() == step
    return {"digest": digest(model.parameters()), "newcomer": newcomer}
