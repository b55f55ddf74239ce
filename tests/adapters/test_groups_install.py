"""Installation under torch's names, and the parts of the groups that need no second process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _test_python_store
from torch.distributed import distributed_c10d as c10d

from holdfast.core.ids import Generation, MemberId
from holdfast.core.protocol.messages import KvReply, KvRequest
from holdfast.errors import GroupError
from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.comm import backend, loopback_ops
from holdfast.frameworks.torch.comm.comm_state import CommState
from holdfast.frameworks.torch.comm.control_store import ControlStore
from holdfast.frameworks.torch.comm.outer_group import OuterGroup
from holdfast.frameworks.torch.comm.reconfigurable_group import COLLECTIVES, ReconfigurableGroup
from holdfast.frameworks.torch.comm.work import is_bug
from holdfast.frameworks.torch.probing import Feature
from holdfast.runtime.agent.kv_server import KvServer
from holdfast.runtime.node.flight_recorder import Flight

pytestmark = pytest.mark.torch


class LocalClient:
    """A control client with its store in this process."""

    generation = Generation(1, 1)
    rank = 0
    world_size = 1
    joining = False
    shared: Path | None = None
    directory: Path | None = None
    several_nodes = False
    flight: Flight | None = None

    def __init__(self, server: KvServer) -> None:
        self._server = server
        self._next = 0

    def kv(
        self,
        op: Any,
        keys: tuple[str, ...] = (),
        value: bytes = b"",
        expected: bytes = b"",
        amount: int = 0,
        timeout_s: float = 300.0,
    ) -> KvReply:
        self._next += 1
        request = KvRequest(self._next, op, keys, value, expected, amount, timeout_s)
        now = time.monotonic()
        replies = self._server.request(now, MemberId(1), request) or self._server.expire(now + timeout_s)
        (reply,) = [reply for _, reply in replies if reply.request_id == request.request_id]
        return reply


@pytest.fixture
def client(tmp_path: Path) -> Iterator[LocalClient]:
    yield LocalClient(KvServer.open(tmp_path / "kv.log"))


def test_library_mode_installs_once() -> None:
    code = """
import holdfast.torch as ht, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
helper = c10d._new_process_group_helper
ht.install()
assert ht.installed() and c10d._new_process_group_helper is helper
store = dist.HashStore()
for backend in ("gloo", "cpu:gloo", None):
    dist.init_process_group(backend, store=dist.PrefixStore(str(backend), store), rank=0, world_size=1)
    group = dist.group.WORLD
    print(type(group).__name__, dist.get_backend(), group.name(), len(ht.fabric().reduce_vote([1])))
    dist.destroy_process_group()
import torch.testing._internal.distributed.fake_pg
dist.init_process_group("fake", rank=0, world_size=2)
print(type(dist.group.WORLD).__name__, dist.get_backend())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "ReconfigurableGroup gloo gloo 1",
        "ReconfigurableGroup cpu:gloo gloo 1",
        "ReconfigurableGroup undefined gloo 1",
        "FakeProcessGroup fake" if "FakeProcessGroup" in done.stdout else "ProcessGroup fake",
    ]


def test_a_worker_that_starts_from_scratch_installs_them() -> None:
    """``import holdfast`` prepares the import of torch; the groups are the first code that imports it."""
    code = """
import holdfast
from holdfast.runtime.node.framework_registry import install_framework
install_framework("torch")
from holdfast.frameworks.torch.comm import backend
print(backend.installed())
"""
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


def test_torchs_watch_over_nccl_does_not_end_who_lost_a_peer() -> None:
    code = """
import os
from holdfast.frameworks.torch.comm import backend
for asked in ({}, {"TORCH_NCCL_ENABLE_MONITORING": "1"}):
    if os.fork() == 0:
        os.environ |= asked
        backend.install()
        names = ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "RETHROW_CUDA_ERRORS")
        print(*(os.environ["TORCH_NCCL_" + name] for name in names), flush=True)
        os._exit(0)
    os.wait()
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_NCCL_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "0 0 0\n0 1 0\n"), done.stderr


def test_the_groups_of_another_torch_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def helper(size: int, backend: str) -> None:
        """Simulate a version of torch that creates groups with other arguments."""

    monkeypatch.setattr(c10d, "_new_process_group_helper", helper)
    monkeypatch.setattr(backend, "_untouched", [])
    for _ in range(2):
        backend.install()
    assert not backend.installed() and "_new_process_group_helper" in backend.untouched()
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"torch {torch.__version__}: " in line and "all workers start again after a fault" in line


def test_this_torch_is_the_one_known() -> None:
    """The check covers every private name in use, and every communication method of a C++ group."""
    assert private_api.failures(Feature.GROUPS) == []
    own = {**vars(OuterGroup), **vars(ReconfigurableGroup)}
    base = {name for name in vars(dist.ProcessGroup) if not name.startswith("__")}
    not_communication = {
        *("BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL", "boxed", "unbox"),
        *("_backend_id", "_enable_collectives_timing", "_has_hooks", "_id", "_pybind11_conduit_v1_"),
        *("_register_backend", "_register_on_completion_hook", "_set_default_backend"),
        *("_wait_for_pending_works", "bound_device_id", "get_group_store", "merge_remote_group"),
        *("split_group", "use_pg_for_symm_mem_rendezvous"),
    }
    assert base - set(own) - not_communication == set()
    assert all(getattr(own[name], "_torchdynamo_disable", False) for name in COLLECTIVES)


def test_a_newcomer_that_rehearses_has_a_backend_that_can_nothing() -> None:
    """During a rehearsal, the group's fake backend must exist and offer no feature.

    Inductor asks every group for its backend when it finds compiled code. FSDP2 and others ask for its features.
    """
    code = """
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
import holdfast.torch as ht
ht.fabric().loopback()
dist.init_process_group("gloo", store=dist.HashStore(), rank=1, world_size=3)
c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=1))
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
able = [n for n in dir(backend) if n.startswith("supports_") and n != "supports_tensor_alloc" and getattr(backend, n)]
print(backend.rank(), backend.size(), able, backend.supports_tensor_alloc(torch.device("cpu")))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    rank, size, able = done.stdout.split(maxsplit=2)
    assert (rank, size) == ("1", "3")
    assert able.replace("'supports_splitting'", "") == "[] False\n"  # torch's fake supports it from 2.14 on


def test_store_passes_torchs_own_test(client: LocalClient) -> None:
    store = ControlStore(client, "g1.1/")
    _test_python_store(store)
    assert store.get("foo") == b"bar"


def test_store_waits_end(client: LocalClient) -> None:
    store = ControlStore(client, "g1.1/")
    with pytest.raises(dist.DistStoreError, match=r"g1\.1/absent"):
        store.wait(["absent"], timedelta(milliseconds=10))
    stopped = ControlStore(client, "g1.1/", stop=lambda: "rank 3 is gone")
    with pytest.raises(GroupError, match="rank 3 is gone"):
        stopped.wait(["absent"])


def test_stores_of_two_generations_share_nothing(client: LocalClient) -> None:
    old, new = ControlStore(client, "g1.1/"), ControlStore(client, "g1.2/")
    old.set("key", "old")
    assert old.check(["key"]) and not new.check(["key"])
    assert (old.num_keys(), new.num_keys()) == (1, 0)


def test_a_late_error_of_an_older_generation_is_no_news() -> None:
    fabric = CommState()
    told: list[str] = []
    fabric.on_poison(told.append)
    fabric.broke("all_reduce", RuntimeError("late"), fabric.epoch - 1)
    assert not fabric.poisoned and not told
    fabric.broke("all_reduce", RuntimeError("Connection closed by peer\nstack"), fabric.epoch)
    fabric.broke("all_reduce", RuntimeError("again"), fabric.epoch)
    assert [fabric.poisoned] == [True]
    assert told == [fabric.reason] == ["all_reduce: Connection closed by peer"]


def test_collectives_are_counted() -> None:
    fabric = CommState()
    counted: list[tuple[int, str]] = []
    fabric.on_collective(lambda count, what, joint: counted.append((count, what)))
    fabric.begin("a")
    fabric.begin("b")
    fabric.on_collective(None)
    fabric.begin("c")
    assert counted == [(1, "a"), (2, "b")] and fabric.collectives == 3


def test_bugs_are_told_from_faults() -> None:
    assert is_bug(TypeError("x")) and is_bug(RuntimeError("ProcessGroupGloo::allreduce: invalid tensor"))
    assert not is_bug(RuntimeError("[pair.cc:553] Connection closed by peer"))


def test_local_outputs_are_sane_whatever_their_layout() -> None:
    output = torch.full((4, 2), torch.nan).t()
    loopback_ops.repeat(output, torch.arange(4.0), 2)
    assert output.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    short = torch.full((3,), torch.nan)
    loopback_ops.copy(short, torch.ones(2))
    assert short.tolist() == [0, 0, 0]
    part = torch.empty(2)
    loopback_ops.chunk(part, torch.arange(6.0), 2, 3)
    assert part.tolist() == [4, 5]


def test_no_thread_of_gloo_outlives_the_script() -> None:
    """A thread that frees a tensor while the interpreter ends aborts the process: "terminate called without ..."."""
    code = """
import pathlib
import torch, torch.distributed as dist
import holdfast.torch as ht
ht.install()

def threads():
    found = [p.read_text().strip() for p in pathlib.Path("/proc/self/task").glob("*/comm")]
    return [name for name in found if "gloo" in name]

class Last:
    def __init__(self):
        self.look = threads
    def __del__(self):  # module contents go when the interpreter ends: after the script and what atexit runs
        print(self.look(), flush=True)

last = Last()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.new_group()
dist.all_reduce(torch.ones(1))
ht.fabric().vote_group()
assert any("runloop" in name for name in threads()), threads()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]"]
