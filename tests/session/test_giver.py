"""A survivor that gives its state, without other processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.core.ids import Generation, MemberId
from holdfast.core.protocol.messages import Settle, StateOffered, StateRefused
from holdfast.errors import StateError
from holdfast.runtime.net.addresses import Address
from holdfast.runtime.worker.state_transfer import fetch
from holdfast.session.checkpoints.state_transfer import StateSource
from holdfast.store.format.json_values import decode_mapping
from tests.runtime.runs import Run


def test_an_order_that_comes_again_leaves_the_server_as_it_is(tmp_path: Path) -> None:
    """The answer to the first order died with an agent. A newcomer may be reading from the server, so it must stay."""
    run = Run(tmp_path).dir
    offers: list[StateOffered] = []
    collected = 0

    def collect(rebuilt: bool) -> Any:
        nonlocal collected
        collected += 1
        return SimpleNamespace(view=lambda fqn, box: memoryview(b"")), {"collected": collected}

    def read(offer: StateOffered) -> object:
        found = fetch({0: Address(offer.host, offer.port)}, [], run.secret(), offer.generation, (0,))
        return decode_mapping(found, "values")["collected"]

    def require(step: int) -> None:
        raise StateError("the script has changed weights")

    client: Any = SimpleNamespace(
        member_id=MemberId(1), rank=0, run_dir=run.path, send=offers.append, moved=lambda size_bytes: None
    )
    refused: list[object] = []
    giver = StateSource(
        client,
        collect=collect,
        memory=SimpleNamespace(verify=lambda step: None, require_replayable=require),
        refuse=lambda *given: refused.append(given),
    )
    order = Settle(member_id=MemberId(1), generation=Generation(1, 2), step=7, then="replace", vouch=True)
    try:
        giver.give(order, True)
        giver.give(order, True)
        assert offers[0] == offers[1] and read(offers[0]) == 1
        # all sources have reported their digests since
        giver.give(msgspec.structs.replace(order, vouch=False), True)
        assert offers[2] == offers[0] and read(offers[2]) == 1
        giver.give(msgspec.structs.replace(order, generation=Generation(1, 3)), True)
        assert read(offers[3]) == 2
        assert not refused
        giver.give(msgspec.structs.replace(order, generation=Generation(1, 4), replays=True), True)
        answer: Any = offers[4]
        assert isinstance(answer, StateRefused) and answer.alone and "changed weights" in answer.reason
    finally:
        giver.stop()


def test_a_survivor_that_cannot_listen_says_so_and_lives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, nnodes=2, nnodes_max=2, bind="203.0.113.1").dir  # an address that no machine has
    offers: list[object] = []
    client: Any = SimpleNamespace(
        member_id=MemberId(1), rank=0, run_dir=run.path, send=offers.append, moved=lambda size_bytes: None
    )
    giver = StateSource(
        client,
        collect=lambda rebuilt: (SimpleNamespace(view=lambda fqn, box: memoryview(b"")), {}),
        memory=SimpleNamespace(verify=lambda step: None, require_replayable=lambda step: None),
        refuse=lambda *given: offers.append(given),
    )
    giver.give(Settle(member_id=MemberId(1), generation=Generation(1, 2), step=7, then="replace"), True)
    assert "cannot give its state" in caplog.text
    (answer,) = offers
    assert isinstance(answer, StateRefused) and answer.alone and answer.step == 7
    assert "it cannot give its state" in answer.reason
