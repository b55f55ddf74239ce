"""Layouts of all ranks in one message: decoding gives the encoded layouts, and a common table is stored once."""

from __future__ import annotations

import random

import msgspec
import pytest

from holdfast.core.ids import NO_VERSION, Generation, LayoutVersion, MemberId
from holdfast.core.job.membership import Roster
from holdfast.core.protocol.health_messages import StateDigests
from holdfast.core.protocol.layout_messages import Layout, Layouts
from holdfast.core.protocol.messages import FRAME_SIZE_BYTES_MAX, Catalogued, LayoutPublished, Settle
from holdfast.errors import ProtocolError
from holdfast.store.layouts.layout import Box, RankLayout, TensorMeta, cut_box
from tests.core.test_controller import Job


@pytest.mark.parametrize("seed", range(20))
def test_what_goes_in_comes_out(seed: int) -> None:
    draw = random.Random(seed)
    pieces = [b"", b"\n", b"{}", b"a\nb", draw.randbytes(50)]
    layouts = {rank: Layout(draw.choice(pieces), draw.choice(pieces)) for rank in draw.sample(range(100), 12)}
    told = Layouts.of(layouts)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Layouts)
    assert again.by_rank() == layouts
    assert sorted(again.tables) == sorted({layout.table for layout in layouts.values()}), "each once"


@pytest.mark.parametrize("ranks", [{"0": (b"", 1)}, {"0": (b"", -1)}, {"zero": (b"", 0)}])
def test_what_names_no_table_or_no_rank_is_refused(ranks: dict[str, tuple[bytes, int]]) -> None:
    with pytest.raises(ProtocolError):
        Layouts((b"",), ranks).by_rank()


def test_the_layouts_of_a_large_job_fit_into_a_frame() -> None:
    """The job has 4096 ranks, each with its own part of 2000 tensors."""
    world, tensors = 4096, 2000
    roster, generation = Roster(), Generation(1, 1)
    table = (
        RankLayout(
            0,
            tuple(
                TensorMeta(
                    f"model.layers.{number:04d}.self_attention.weight",
                    "F32",
                    (world, 64),
                    cut_box((world, 64), (((world, 0),), ())),
                    (((world, 0),), ()),
                )
                for number in range(tensors)
            ),
            world,
        )
        .encode()
        .table
    )
    first, told = None, None
    for rank in range(world):
        own = RankLayout(rank, (TensorMeta("w", "F32", (4,), Box((0,), (4,))),), world).encode().own
        layout = Layout(own, table)
        first = first or layout
        told = roster.publish(
            LayoutPublished(MemberId(rank + 1), generation, rank, LayoutVersion(generation, 0), layout), world
        )
    assert told is not None and first is not None
    data = msgspec.msgpack.encode(Catalogued(MemberId(1), generation, LayoutVersion(generation, 0), told))
    assert len(data) < FRAME_SIZE_BYTES_MAX / 32 < world * len(first.table)
    assert msgspec.msgpack.decode(data, type=Catalogued).layouts.by_rank()[0] == first


def test_sources_of_a_save_plan_with_what_all_of_them_hold_now() -> None:
    """State may have come since the last step. It is published before the order to write."""
    job = Job(verify=True).up()
    job.exit(1)
    job.settle(0, "aborted", 5)
    job.settle(2, "aborted", 5)
    first = job.sent(Settle)
    assert [(settle.vouch, settle.save) for settle in first] == [(True, None)] * 2
    for rank, settle in zip((0, 2), first, strict=True):
        new = LayoutPublished(
            settle.member_id, job.generation, rank, version=NO_VERSION, layout=Layout(b"new", b"")
        )
        job.post(new)
        job.post(StateDigests(settle.member_id, settle.generation, settle.step, copies=()))
    for order in job.sent(Settle):
        assert order.save is not None and not order.vouch
        assert {r: found.own for r, found in order.save.layouts.by_rank().items()} == {
            0: b"new", 1: b"{}", 2: b"new"
        }  # fmt: skip
