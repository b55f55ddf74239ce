"""Compiled user code under a session: the same graphs and breaks as without one, and each is compiled once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.utils import counters

import holdfast
from holdfast.package import DIRECTORY

pytestmark = pytest.mark.torch


class Net(nn.Module):
    """A module in the user's own file, which dynamo compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Shape [batch, 4] -> [batch, 1]."""
        out: Tensor = self.last(self.norm(self.first(x)).relu())
        return out


def outside(net: nn.Module, backend: Any) -> Callable[[Tensor], Tensor]:
    """Compile the module for the loop. The session gets the module itself."""
    made: Callable[[Tensor], Tensor] = torch.compile(net, backend=backend)
    return made


def in_place(net: nn.Module, backend: Any) -> Callable[[Tensor], Tensor]:
    """Compile with ``Module.compile``."""
    net.compile(backend=backend)
    return net


def whole(net: nn.Module, backend: Any) -> Callable[[Tensor], Tensor]:
    """Compile the call of the module, with its hooks, inside a function that must be one graph."""

    def run(x: Tensor) -> Tensor:
        out: Tensor = net(x)
        return out

    made: Callable[[Tensor], Tensor] = torch.compile(run, backend=backend, fullgraph=True)
    return made


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Reset the compiler and its counters."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("way", [outside, in_place, whole])
def test_a_session_adds_no_graph_and_no_break(tmp_path: Path, way: Callable[..., Any]) -> None:
    def train(session: bool) -> tuple[int, int]:
        torch._dynamo.reset()
        counters.clear()
        graphs = []

        def backend(graph: Any, examples: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        net = Net()
        run = way(net, backend)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def update() -> None:
            run(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        if session:
            with holdfast.session(model=net, optimizer=optimizer, checkpoint=tmp_path, resume="never") as s:
                for step in s.steps(until=5):
                    with step:
                        update()
        else:
            for _ in range(5):
                update()
        return len(graphs), sum(counters["graph_break"].values())

    assert train(session=True) == train(session=False) == (1, 0)


def one_by_one(update: Callable[[Tensor], None], optimizer: Any) -> Callable[[Tensor], None]:
    """Compile ``optimizer.step`` as the documentation of torch shows."""
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    return update


def all_together(update: Callable[[Tensor], None], optimizer: Any) -> Callable[[Tensor], None]:
    """Compile forward, backward and update as one function."""
    made: Callable[[Tensor], None] = torch.compile(update, backend="eager")
    return made


@pytest.mark.filterwarnings("ignore")  # of torch, when it traces its own optimizers
@pytest.mark.parametrize("way", [one_by_one, all_together])
def test_a_compiled_update_votes_and_keeps_its_bits(tmp_path: Path, way: Callable[..., Any]) -> None:
    """Regression: torch.compile traced into the vote of the session, and failed there in a job of several ranks."""
    traced: set[str] = set()
    handle = register_bytecode_hook(lambda code, _: traced.add(code.co_filename))

    def train(session: bool) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(1)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

        def update(x: Tensor) -> None:
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        run = way(update, optimizer)
        batches = [torch.full((2, 4), float(number)) for number in range(3)]
        if session:
            with holdfast.session(model=net, optimizer=optimizer, checkpoint=tmp_path, resume="never") as s:
                for step in s.steps(batches, until=3):
                    with step as batch:
                        run(batch)
            assert s.step == 3
        else:
            for batch in batches:
                run(batch)
        return [parameter.detach().clone() for parameter in net.parameters()]

    assert all(map(torch.equal, train(session=True), train(session=False)))
    handle.remove()
    assert not [path for path in traced if str(DIRECTORY) in path]
