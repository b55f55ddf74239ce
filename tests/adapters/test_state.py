"""Names, boxes, capture and restore of the training state in one process."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.errors import CheckpointMismatch, StateError, StepError, UnsupportedError, UsageError
from holdfast.frameworks.common import state_tree
from holdfast.frameworks.common.state_tree import join, split
from holdfast.frameworks.torch.adapter import TorchAdapter
from holdfast.frameworks.torch.state.boxes import DTYPES, byte_view, parts_of
from holdfast.frameworks.torch.state.optimizer_state import Undo, named_optimizers
from holdfast.frameworks.torch.state.parameter_names import names_of
from holdfast.frameworks.torch.state.snapshot import Snapshot
from holdfast.frameworks.torch.state.state import TorchState
from holdfast.store.format.json_values import decode_values, encode_values
from holdfast.store.layouts.layout import Box, Catalogue

pytestmark = pytest.mark.torch


class Net(nn.Module):
    """A model with tied weights, a non-persistent buffer and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape [n, 4] -> [n, 4]."""
        out: torch.Tensor = self.norm(self.b(self.a(x)))
        return out


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Run one update."""
    net(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def copy_over(source: TorchState, target: TorchState) -> None:
    """Save ``source`` to memory and restore it into ``target``."""
    collected = source.collect()
    catalogue = Catalogue.from_layouts({0: collected.layout(0, 1)})
    values = decode_values(encode_values(collected.values))
    assert isinstance(values, dict)
    restore = target.restore(catalogue, values)
    for meta, data in restore.buffers():
        data[:] = collected.view(meta.fqn, meta.box)
    restore.finish()


def same(a: Any, b: Any) -> bool:
    """Return whether two trees are equal, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return bool(torch.equal(a, b)) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_names_hide_wrappers_and_tie_weights() -> None:
    net = Net()
    compiled: Any = torch.compile(net, backend="eager")
    for model in (net, compiled):
        names = names_of(model)
        assert list(names.parameters) == ["a.weight", "a.bias", "b.bias", "norm.weight", "norm.bias"]
        assert names.aliases == {"b.weight": "a.weight"}
        assert "mask" in [slot.fqn for slot in names.buffers]
    assert "g.a.weight" in names_of({"g": net, "d": Net()}).parameters


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_dtype_has_bytes(dtype: torch.dtype) -> None:
    tensor = torch.zeros(2, 3).to(dtype)
    assert len(byte_view(tensor)) == 6 * tensor.element_size()
    assert [p.box for p in parts_of(tensor, "x")] == [Box.whole((2, 3))]
    assert len(byte_view(torch.tensor(1.0))) == 4


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.01),
        lambda p: torch.optim.Adagrad(p, lr=0.01),
        lambda p: torch.optim.LBFGS(p, lr=0.01, history_size=2, max_iter=2),
    ],
    ids=["adamw", "momentum", "sgd", "adagrad", "lbfgs"],
)
def test_optimizer_state_comes_back(make: Any) -> None:
    def train(net: Net, optimizer: Any, count: int) -> None:
        for number in range(count):
            torch.manual_seed(number)
            x = torch.randn(6, 4)

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = net(x).square().mean()  # noqa: B023
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            optimizer.step(closure)

    first, second = Net(), Net()
    one, two = make(list(first.parameters())), make(list(second.parameters()))
    train(first, one, 3)
    copy_over(TorchState(first, {"default": one}), TorchState(second, {"default": two}))
    assert same(one.state_dict(), two.state_dict())
    train(first, one, 2)
    train(second, two, 2)
    assert same(first.state_dict(), second.state_dict())
    assert same(one.state_dict(), two.state_dict())


def test_everything_else_comes_back() -> None:
    def make() -> tuple[TorchState, dict[str, Any]]:
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters())
        schedule: Any = torch.optim.lr_scheduler
        schedulers = {
            "steps": schedule.MultiStepLR(optimizer, [1, 4, 4]),
            "plateau": schedule.ReduceLROnPlateau(optimizer),
        }
        extras: dict[str, Any] = {"ema": Net(), "best": 0.0, "seen": {}, "gen": torch.Generator()}
        scaler = torch.amp.GradScaler("cpu")
        state = TorchState(net, {"default": optimizer}, schedulers, scaler, extras)
        return state, {
            "optimizer": optimizer,
            "schedulers": schedulers,
            "scaler": scaler,
            "extras": extras,
            "net": net,
        }

    state, parts = make()
    parts["scaler"].scale(torch.ones(1))
    step(parts["net"], parts["optimizer"])
    for scheduler in parts["schedulers"].values():
        scheduler.step(*([1.0] if "Plateau" in type(scheduler).__name__ else []))
    parts["extras"].update(best=float("inf"), seen={"a": [1, (2, b"x")], 7: Counter(x=2)})
    other, again = make()
    seen = again["extras"]["seen"]
    copy_over(state, other)
    for name, scheduler in parts["schedulers"].items():
        assert scheduler.state_dict() == again["schedulers"][name].state_dict()
    assert parts["scaler"].state_dict() == again["scaler"].state_dict()
    assert same(parts["extras"]["ema"].state_dict(), again["extras"]["ema"].state_dict())
    assert again["extras"]["best"] == float("inf")
    assert again["extras"]["seen"] is seen and seen == parts["extras"]["seen"]
    assert parts["optimizer"].param_groups[0]["lr"] == again["optimizer"].param_groups[0]["lr"]


def test_what_cannot_be_saved_is_named() -> None:
    net = Net()
    optimizer = {"default": torch.optim.SGD(net.parameters())}
    with pytest.raises(StateError, match=r"state\.thing\.inner\.1: an object of type .*Exception"):
        TorchState(net, optimizer, extras={"thing": {"inner": [1, Exception()]}})
    with pytest.raises(StateError, match="not in the model"):
        TorchState(net, {"x": torch.optim.SGD([nn.Parameter(torch.ones(3))])})
    with pytest.raises(StateError, match="meta"):
        TorchState(nn.Linear(2, 2, device="meta"), {})
    with pytest.raises(UsageError, match="not a torch"):
        names_of([net])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="optimizer got a int"):
        named_optimizers([1])


def test_optimizers_that_communicate_are_refused() -> None:
    kind = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})
    with pytest.raises(UnsupportedError, match="ZeroRedundancyOptimizer"):
        named_optimizers(kind([nn.Parameter(torch.ones(2))]))


@pytest.mark.parametrize("wrapped", [False, True])
def test_megatron_s_optimizers_are_refused_by_name(wrapped: bool) -> None:
    base = type("MegatronOptimizer", (), {})
    optimizer = type("DistributedOptimizer", (base,), {})()
    if wrapped:
        chained = optimizer
        optimizer = type("ChainedOptimizer", (base,), {"chained_optimizers": [chained]})()
    with pytest.raises(UnsupportedError, match="DistributedOptimizer of Megatron communicates inside step"):
        named_optimizers(optimizer)
    with pytest.raises(UnsupportedError, match="FP32Optimizer of Megatron is no torch optimizer"):
        named_optimizers({"it": type("FP32Optimizer", (base,), {})()})


def test_other_optimizers_do_not_fit() -> None:
    net = Net()
    state = TorchState(net, {"default": torch.optim.SGD(net.parameters())})
    with pytest.raises(CheckpointMismatch, match="optimizers"):
        copy_over(state, TorchState(net, {"other": torch.optim.SGD(net.parameters())}))


ADAMW = torch.optim.AdamW
PLAIN = torch.optim.SGD
MOMENTUM = partial(PLAIN, momentum=0.9)


def changed(then: Any, now: Any, *, older: bool = False) -> str:
    """Return why ``now`` refuses a checkpoint of optimizer ``then``, or an empty text.

    With ``older``, the checkpoint does not record the class of the optimizer.
    """
    first, second = Net(), Net()
    optimizer = then(first.parameters(), lr=0.1)
    step(first, optimizer)
    source, target = (
        TorchState(first, {"it": optimizer}),
        TorchState(second, {"it": now(second.parameters(), lr=0.1)}),
    )
    collected = source.collect()
    if older:
        del collected.values["optimizers"]["it"]["class"]
    try:
        target.restore(Catalogue.from_layouts({0: collected.layout(0, 1)}), collected.values)
    except CheckpointMismatch as error:
        return str(error)
    return ""


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("sgd", [PLAIN, MOMENTUM], ids=["plain", "momentum"])
def test_state_of_another_optimizer_is_refused(sgd: Any, older: bool) -> None:
    dropped = changed(ADAMW, sgd, older=older)
    assert "optimizer 'it'" in dropped and "SGD" in dropped and "exp_avg, exp_avg_sq, step" in dropped
    assert "dampening, momentum" in dropped and "resume='never'" in dropped and ("AdamW" in dropped) != older
    assert "for each parameter; this run has AdamW with amsgrad, betas" in changed(sgd, ADAMW, older=older)


def test_an_optimizer_of_another_name_or_version_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Renamed(torch.optim.AdamW):
        """The same optimizer under another name."""

    for then, now in (
        (ADAMW, Renamed),
        (Renamed, ADAMW),
        (MOMENTUM, PLAIN),
        (partial(ADAMW, amsgrad=True), ADAMW),
    ):
        assert changed(then, now) == "" == changed(then, now, older=True)
    assert caplog.text.count("written with") == 2 and "it continues with the settings" in caplog.text
    assert changed(torch.optim.RAdam, torch.optim.Adamax) and not changed(
        ADAMW, torch.optim.RAdam, older=True
    )


def test_snapshot_puts_back_what_forward_changes() -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = TorchState(net, {"default": optimizer}, scheduler, extras={"log": [1]})
    step(net, optimizer)
    snapshot = Snapshot(state)
    snapshot.take()
    buffers = {k: v.clone() for k, v in net.named_buffers()}
    rate, schedule = optimizer.param_groups[0]["lr"], scheduler.state_dict().copy()
    net(torch.randn(6, 4)).sum().backward()
    net.mask = torch.zeros(3)
    scheduler.step()
    state.extras["log"].append(2)
    frozen = state.collect(snapshot.copies())
    assert torch.equal(frozen.tensors["norm.running_mean"], buffers["norm.running_mean"])
    assert torch.equal(frozen.tensors["mask"], torch.ones(3))
    assert frozen.values["schedulers"]["default"]["last_epoch"] == schedule["last_epoch"]
    snapshot.restore()
    assert same(dict(net.named_buffers()), buffers)
    assert optimizer.param_groups[0]["lr"] == rate
    assert scheduler.state_dict() == schedule
    assert state.extras["log"] == [1]
    assert all(p.grad is None for p in net.parameters())


def test_the_end_of_a_loop_keeps_buffers_that_an_evaluation_changes() -> None:
    """Regression: statistics of an evaluation in training mode were counted twice after a fault in it."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    state = TorchState(net, {"default": optimizer})
    snapshot = Snapshot(state)
    snapshot.take()
    step(net, optimizer)
    snapshot.take_before(1, whole=True)
    ended = {k: v.clone() for k, v in net.named_buffers()}
    net(torch.randn(6, 4))
    assert not same(dict(net.named_buffers()), ended)
    kept = state.collect(before=snapshot.before(1)).tensors
    assert same({k: kept[k] for k in ended}, ended)
    assert not torch.equal(state.collect().tensors["norm.running_mean"], ended["norm.running_mean"])


def test_undo_takes_updates_back() -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    state = TorchState(net, {"default": optimizer})
    snapshot = Snapshot(state)
    for _ in range(2):  # first without, then with a state to go back to
        snapshot.take()
        before = {k: v.clone() for k, v in net.state_dict().items()}
        held = {k: v["exp_avg"].clone() for k, v in optimizer.state_dict()["state"].items()}
        snapshot.undo.record(optimizer)
        step(net, optimizer)
        frozen = state.collect(snapshot.copies())
        assert torch.equal(frozen.tensors["a.weight"], before["a.weight"])
        assert ("optimizer.default.a.weight.exp_avg" in frozen.tensors) == bool(held)
        snapshot.restore()
        assert same(net.state_dict(), before)
        assert same({k: v["exp_avg"] for k, v in optimizer.state_dict()["state"].items()}, held)
        step(net, optimizer)
    assert Undo().weights() == {}


class Counting(torch.optim.SGD):
    """An optimizer that counts its updates in an attribute, and makes another one after the first."""

    def __init__(self, parameters: Any, scale: float = 1.0) -> None:
        super().__init__(parameters, lr=0.1)
        self.updates, self.scale = 0, scale
        self.scratch: torch.Tensor | None = None

    def step(self, closure: Any = None) -> Any:
        """Update the parameters."""
        if not self.updates:
            self.began = True
        self.updates += 1
        return super().step(closure)


def test_attributes_that_updates_change_are_state_of_an_optimizer() -> None:
    """Regression: a resumed job began with the attributes of a start: other weights, exit code 0."""
    old, new = Net(), Net()
    counting, resumed = Counting(old.parameters()), Counting(new.parameters(), scale=2.0)
    source, target = TorchState(old, {"default": counting}), TorchState(new, {"default": resumed})
    assert "attributes" not in source.collect().values["optimizers"]["default"]
    step(old, counting)
    copy_over(source, target)
    assert (resumed.updates, resumed.began) == (1, True) and resumed.scale == 2.0  # a setting stays
    assert target.keeps(resumed, "updates") and not target.keeps(new, "updates")
    snapshot = Snapshot(target)
    snapshot.take()
    snapshot.undo.record(resumed)
    step(new, resumed)
    frozen = target.collect(snapshot.copies())
    assert frozen.values["optimizers"]["default"]["attributes"] == {"began": True, "updates": 1}
    snapshot.restore()
    assert resumed.updates == 1


def test_a_flag_beside_objects_that_updates_make_is_not_kept() -> None:
    """A process that joins or resumes has to make these objects again."""
    old, new = Net(), Net()
    counting, resumed = Counting(old.parameters()), Counting(new.parameters())
    source, target = TorchState(old, {"default": counting}), TorchState(new, {"default": resumed})
    step(old, counting)
    counting.scratch = torch.zeros(3)
    assert "attributes" not in source.collect().values["optimizers"]["default"]
    copy_over(source, target)
    assert resumed.updates == 0
    copy_over(source, source)
    assert counting.updates == 1


def test_a_return_to_the_start_takes_attributes_back() -> None:
    net = Net()
    optimizer = Counting(net.parameters())
    state = TorchState(net, {"default": optimizer})
    other = Net()
    start = TorchState(other, {"default": Counting(other.parameters())})
    step(net, optimizer)
    copy_over(start, state)
    assert optimizer.updates == 0 and not hasattr(optimizer, "began")


def test_values_that_the_store_does_not_know() -> None:
    value = {"d": deque([1, 2], maxlen=3), "s": {3, 1}, "f": frozenset("a"), "n": np.int32(5), "t": (1, [2])}
    plain = decode_values(encode_values(split(value, "x")))
    assert join(plain, lambda leaf: leaf) == value
    assert join(plain, lambda leaf: leaf)["d"].maxlen == 3
    sums: dict[str, Any] = defaultdict(dict, total=defaultdict(float, x=0.5))
    again = join(decode_values(encode_values(split(sums, "x"))), lambda leaf: leaf)
    assert again == sums and again["other"] == {} and again["total"]["y"] == 0.0
    with pytest.raises(StateError, match=r"x: an object of type collections.defaultdict cannot be saved"):
        split(defaultdict(lambda: 3), "x")
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(StateError, match="contain itself"):
        split(loop, "x")


def test_few_lists_that_hold_more_than_any_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each level of shared lists took ten times as long, so a file of some hundred bytes never ended."""
    monkeypatch.setattr(state_tree, "NODES_MAX", 2_000)
    value: object = 0
    for _ in range(64):
        value = [value] * 10
    with pytest.raises(StateError, match="more than 2000 values"):
        split(value, "state")
    assert split([0] * 1_999, "state") == [0] * 1_999


def test_a_view_follows_a_parameter_that_gets_other_memory() -> None:
    """Regression: ``parameter.data = ...`` was not seen by digests of a state that was collected before."""
    model = nn.Linear(2, 2, bias=False)
    collected = TorchState(model, {}, None, None, {}).collect()
    box = Box.whole((2, 2))
    before, marks = bytes(collected.view("weight", box)), collected.writes()
    model.weight.data = torch.full((2, 2), 3.0)
    assert bytes(collected.view("weight", box)) == model.weight.detach().numpy().tobytes() != before
    assert collected.writes() != marks


def test_a_function_among_the_settings_of_an_optimizer_is_no_state() -> None:
    """LARS, as many scripts have it, is given filters of parameters. Regression: such a job was refused."""

    def is_vector(parameter: torch.Tensor) -> bool:
        return parameter.ndim == 1

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(
        [{"params": model.parameters(), "filter": is_vector, "kind": nn.Linear}], lr=0.5
    )
    state = TorchState(model, {"default": optimizer}, None, None, {})
    (group,) = state.optimizers["default"].hyperparameters()
    assert "filter" not in group and "kind" not in group and group["lr"] == 0.5
    state.collect()
    state.optimizers["default"].set_hyperparameters([{**group, "lr": 0.25}])
    assert optimizer.param_groups[0]["filter"] is is_vector and optimizer.param_groups[0]["lr"] == 0.25


class Container(torch.optim.Optimizer):
    """An optimizer that leaves its updates to others (torchtitan's ``OptimizersContainer``)."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = list(optimizers)
        super().__init__(
            [p for each in optimizers for group in each.param_groups for p in group["params"]], {}
        )

    def step(self) -> None:  # type: ignore[override]
        """Let each optimizer make its update."""
        for optimizer in self.optimizers:
            optimizer.step()


def test_an_optimizer_whose_state_another_one_has_is_refused() -> None:
    """Regression: its momenta were not saved, and a replacement began without them: other weights, exit code 0."""
    first, second = (torch.optim.Adam([nn.Parameter(torch.ones(2))]) for _ in range(2))
    with pytest.raises(
        UnsupportedError, match=r"a Container leaves its updates to optimizers\[0\], whose"
    ) as one:
        named_optimizers(Container(first))
    assert "session(optimizer=it.optimizers[0])" in str(one.value.hint)
    with pytest.raises(UnsupportedError, match=r"to optimizers\[0\], optimizers\[1\], whose state") as two:
        named_optimizers(Container(first, second))
    assert "[it.optimizers[0], it.optimizers[1], ...]" in str(two.value.hint)
    shared = Container(first)
    shared.state = first.state
    assert named_optimizers(shared) == {"default": shared}


def test_a_container_of_an_optimizer_of_the_session_may_step() -> None:
    net = nn.Linear(2, 1)
    inner, other = torch.optim.Adam(net.parameters()), torch.optim.Adam(net.parameters())
    adapter = TorchAdapter(net, inner, None, None, {}, 0)
    for _ in range(20):
        adapter._refuse_unknown(Container(inner))
        # Regression: a new optimizer at the address of a deleted one was taken for that one.
        with pytest.raises(StepError, match="a Container that the session does not know"):
            adapter._refuse_unknown(Container(other))
