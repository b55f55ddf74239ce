"""Results of collectives before the first step, for ranks that start again on another host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.cables import Network, why_not
from tests.nodes.jobs import TRAIN, Hosts
from tests.nodes.test_departures import start_with_spare
from tests.nodes.test_nodes import alone

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.torch,
    pytest.mark.processes,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no network of several hosts here: {WHY_NOT}"),
]

SENT = TRAIN.replace(
    "torch.manual_seed(7)\n",
    """torch.manual_seed(7)
sent = [{"scale": 0.5}] if dist.get_rank() == 0 else [None]
dist.broadcast_object_list(sent, src=0)
goal = torch.tensor(3.0 if dist.get_rank() == 0 else 9.0)
dist.broadcast(goal, src=0)
""",
).replace("model(batch[0]) - 1)", 'sent[0]["scale"] * model(batch[0]) - goal)')


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    """Yield a network of three hosts."""
    with Network(3) as network:
        yield network


def test_a_rank_that_moves_to_another_host_gets_what_rank_0_sent_at_the_start(
    net: Network, tmp_path: Path
) -> None:
    """Regression: its script got its own number, and trained other weights with exit code 0."""
    with Hosts(net, tmp_path, "2:3", SENT, ("150", "0.4", str(tmp_path / "out")), torch=True) as hosts:
        start_with_spare(hosts)
        hosts.wait_step(1, 5)
        hosts.commands[1].kill()
        assert hosts.wait_event(0, "recovered").data["steps_lost"] == 0
        (tmp_path / "out.hurry").touch()
        assert [hosts.wait(0), hosts.wait(2)] == [0, 0], hosts.output(0)
    assert (tmp_path / "out-1").read_text() == alone(tmp_path, 150, text=SENT)
