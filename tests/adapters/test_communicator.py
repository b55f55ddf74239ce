"""Connections are replaced or kept; requirements of NCCL, tested with backends that only record their calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from holdfast.core.ids import Generation
from holdfast.errors import GroupError, PeerLost, UnsupportedError
from holdfast.frameworks.common.adapter import Unsevered
from holdfast.frameworks.torch.comm import comm_state as fabrics
from holdfast.frameworks.torch.comm.comm_state import CommState
from holdfast.frameworks.torch.comm.communicator import FreshGroups
from holdfast.frameworks.torch.comm.group_builder import BuiltGroup, GroupSpec
from holdfast.frameworks.torch.comm.nccl_abort import Abort
from holdfast.frameworks.torch.comm.reconfigurable_group import ReconfigurableGroup
from holdfast.frameworks.torch.comm.work import Wait
from holdfast.frameworks.torch.private_api import Store
from tests.runtime.runs import until

pytestmark = pytest.mark.torch

LIMIT = timedelta(seconds=30)


class Nccl:
    """A backend that records its calls."""

    def __init__(self, log: list[str] | None = None, name: str = "a") -> None:
        self.log = [] if log is None else log
        self.name = name
        self.may_end = threading.Event()
        self.may_end.set()
        self.error = "SUCCESS"

    def _group_start(self) -> None:
        self.log.append("start")

    def _group_end(self) -> None:
        self.log.append("end")

    def abort(self) -> None:
        self.may_end.wait(20)
        self.log.append(f"abort {self.name}")

    def get_error(self) -> Any:
        return SimpleNamespace(name=self.error)


def _spec(*backends: tuple[str, str], world_size: int = 1) -> GroupSpec:
    return GroupSpec("world.0", ((), 0), 0, world_size, backends or (("cpu", "gloo"),), LIMIT)


def _stores(uuid: str, timeout: timedelta) -> Store:
    return HashStore()


def _built(*backends: Nccl) -> BuiltGroup:
    store = HashStore()
    return BuiltGroup(dist.ProcessGroup(store, 0, 1), store, [], backends)


# ---------------------------------------------------------------- replacing connections


def test_a_refused_attempt_leaves_the_old_group_alive() -> None:
    """An attempt to replace connections fails here because the store is gone, as after another fault."""
    stores: list[Callable[[], Store]] = [HashStore]
    communicator = FreshGroups(CommState(), _spec(), lambda uuid, timeout: stores[-1]())
    communicator.reconfigure("1.1", communicator.all_handles(), LIMIT)
    before = communicator.group

    def gone() -> Store:
        raise GroupError("the store is gone")

    stores.append(gone)
    with pytest.raises(GroupError, match="the store is gone"):
        communicator.reconfigure("1.2", communicator.all_handles(), LIMIT)
    assert communicator.group is before
    ones = torch.ones(2)
    communicator.group.allreduce([ones], dist.AllreduceOptions()).wait()
    communicator.close()


def test_a_peer_that_does_not_come_leaves_the_old_group_alive() -> None:
    spec = _spec(world_size=2)
    communicator = FreshGroups(CommState(), spec, _stores)
    old = communicator.built = _built()
    with pytest.raises(GroupError, match=r"world\.0 .* could not be built"):
        communicator.reconfigure("1.2", communicator.all_handles(), timedelta(seconds=0.2))
    assert communicator.built is old and old.unsevered() == () and not old.buried()


def test_another_set_of_ranks_is_refused() -> None:
    communicator = FreshGroups(CommState(), _spec(), _stores)
    with pytest.raises(GroupError, match=r"other ranks than it was made for: world\.0/0, world\.0/1"):
        communicator.reconfigure("1.1", ["world.0/0", "world.0/1"], LIMIT)


def test_success_buries_the_group_of_before() -> None:
    fabric = CommState()
    communicator = FreshGroups(fabric, _spec(), _stores)
    for number in range(3):
        before = communicator.built
        communicator.reconfigure(f"1.{number}", [communicator.get_reconfigure_handle()], LIMIT)
        assert communicator.supports_reconfigure and communicator.built is not before
        if before is not None:
            assert before.buried(20.0)
    communicator.abort()
    communicator.close()
    with pytest.raises(GroupError, match="it was destroyed"):
        assert communicator.group


# ---------------------------------------------------------------- aborts


def test_all_communicators_are_aborted_inside_one_group_call() -> None:
    log: list[str] = []
    fabric = CommState()
    inners = [_built(Nccl(log, "a"), Nccl(log, "b")), _built(Nccl(log, "c")), _built()]
    fabric.sever(inners)
    fabric.sever(inners)  # a second fault
    until("aborted", lambda: all(inner.severed() for inner in inners))
    assert log == ["start", "abort a", "abort b", "abort c", "end"]


def test_an_abort_that_does_not_return_is_seen() -> None:
    backend = Nccl()
    backend.may_end.clear()
    abort = Abort([backend]).start()
    before = abort.done
    backend.may_end.set()
    abort.wait()
    assert (before, abort.done, abort.error) == (False, True, None)


def test_an_abort_that_raises_has_ended() -> None:
    class Broken(Nccl):
        def abort(self) -> None:
            raise RuntimeError("ncclCommAbort: unhandled system error")

    log: list[str] = []
    abort = Abort([Broken(log), Nccl(log, "b")]).start()
    abort.wait()
    assert abort.done and log == ["start", "abort b", "end"] and "unhandled" in str(abort.error)


def test_aborts_have_a_bound_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose abort never returns must be replaced. A process whose abort takes a second continues."""
    monkeypatch.setattr(fabrics, "QUIESCE_S", 0.0)
    backend, fabric = Nccl(), CommState()
    backend.may_end.clear()
    fabric._vote = _built(backend)
    fabric.poison("a peer is lost")
    threading.Timer(0.2, backend.may_end.set).start()
    assert fabric.quiesce()
    stuck = Nccl()
    stuck.may_end.clear()
    fabric._vote = _built(stuck)
    fabric.poison("again")
    monkeypatch.setattr(fabrics, "ABORTS_S", 0.05)
    with pytest.raises(Unsevered, match="did not return"):
        fabric.reconfigure(Generation(1, 2))
    stuck.may_end.set()


def test_a_group_of_nccl_is_dropped_when_its_abort_has_returned() -> None:
    backend = Nccl()
    backend.may_end.clear()
    fabric, inner = CommState(), _built(backend)
    fabric.bury(inner)
    assert not inner.buried(0.05)
    backend.may_end.set()
    assert inner.buried(20.0)


def test_an_error_beside_the_collectives_stops_the_vote() -> None:
    backend, fabric = Nccl(), CommState()
    told: list[str] = []
    fabric.on_poison(told.append)
    group = SimpleNamespace(order=((), 0), inner=_built(backend))
    fabric.add(group)
    backend.error = "REMOTE_ERROR"
    with pytest.raises(PeerLost, match="REMOTE_ERROR"):
        fabric.reduce_vote([1])
    assert told == ["NCCL: an error beside the collectives: REMOTE_ERROR"]


# ---------------------------------------------------------------- calls


def _group(*backends: tuple[str, str]) -> ReconfigurableGroup:
    fabric = CommState()
    fabric.loopback()
    group = ReconfigurableGroup(fabric, _spec(*backends), HashStore())
    fabric.looped = False
    fabric._refresh()
    return group


@pytest.mark.parametrize(
    ("backends", "way"),
    [
        ((("cpu", "gloo"),), Wait.SLICES),
        ((("cuda", "nccl"),), Wait.STREAM),
        ((("cpu", "gloo"), ("cuda", "nccl")), Wait.STREAM),
    ],
)
def test_a_barrier_is_waited_for_as_the_backend_that_runs_it(
    backends: tuple[tuple[str, str], ...], way: Wait
) -> None:
    """A wait of 50 ms on NCCL aborts its communicator, so the way to wait depends on the backend of the barrier."""
    assert _group(*backends)._default_way is way


def test_coalescing_ends_in_the_group_where_it_began() -> None:
    log: list[str] = []
    inner = SimpleNamespace(
        _start_coalescing=lambda device: log.append("start"), _end_coalescing=lambda device: log.append("end")
    )
    group, cpu = _group(), torch.device("cpu")
    group.communicator.built = SimpleNamespace(group=inner, unsevered=tuple, sever=lambda abort: None)  # type: ignore[assignment]
    group._start_coalescing(cpu)
    group._fabric.shield(True)
    group._fabric.poison("a peer is lost")
    group._end_coalescing(cpu).wait()
    assert log == ["start", "end"]
    group._end_coalescing(cpu).wait()
    assert log == ["start", "end"]


def test_a_call_inside_coalescing_may_have_no_work() -> None:
    """NCCL returns one work for all calls, at the end of the coalescing."""
    group = _group()
    inner = SimpleNamespace(allreduce=lambda tensors: None)
    group.communicator.built = SimpleNamespace(group=inner)  # type: ignore[assignment]
    assert group.allreduce([torch.ones(1)]).wait()


def test_a_collective_in_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match=r"barrier while a CUDA graph is captured"):
        _group(("cuda", "nccl")).barrier()
