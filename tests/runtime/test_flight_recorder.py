"""The ring of recent collectives, written by one process and read by another."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from holdfast.core.protocol.status_page import FLIGHT_SLOTS, Word
from holdfast.runtime.node.flight_recorder import TEXT_SIZE_BYTES, text_of
from holdfast.runtime.node.status_page import Page


def test_the_last_collectives_are_read_from_outside(tmp_path: Path) -> None:
    path = tmp_path / "page"
    with closing(Page.create(path)) as page, closing(Page.open(path)) as reader:
        assert reader.flight.read() == [] and not reader.flight.waits() and not reader.flight.rests()
        text = text_of("world.0", "all_reduce of 64 float32")
        for count in range(1, FLIGHT_SLOTS + 11):
            page.flight.counted(count)
            page.flight.begin(count, count - 5, text)
            assert reader.flight.waits() and not reader.flight.rests()
            if count < FLIGHT_SLOTS + 9:
                page.flight.end(count)
                assert not reader.flight.waits() and reader.flight.rests()
        assert not reader[Word.FREED_NS]
        page.flight.end(FLIGHT_SLOTS + 9, broken=True)
        found = reader.flight.read()
        assert [each.order for each in found] == list(range(11, FLIGHT_SLOTS + 11))
        assert found[-1].number == FLIGHT_SLOTS + 5 and not found[-1].ended_ns
        assert str(found[-1]).endswith("of group world.0: all_reduce of 64 float32, under way")
        assert found[-2].broken and "broken after" in str(found[-2])
        assert reader[Word.FREED_NS] == found[-2].ended_ns
        assert found[0].ended_ns >= found[0].begun_ns > 0 and "done after" in str(found[0])
        assert reader[Word.COLLECTIVES] == reader[Word.SEQUENCE] == FLIGHT_SLOTS + 10


def test_the_end_of_a_collective_that_was_overwritten_is_nobodys(tmp_path: Path) -> None:
    with closing(Page.create(tmp_path / "page")) as page:
        page.flight.begin(1, 1, text_of("world.0", "barrier"))
        page.flight.begin(1 + FLIGHT_SLOTS, 2, text_of("world.0", "barrier"))
        page.flight.end(1)
        (one,) = page.flight.read()
        assert one.order == 1 + FLIGHT_SLOTS and not one.ended_ns


def test_long_names_are_cut(tmp_path: Path) -> None:
    with closing(Page.create(tmp_path / "page")) as page:
        page.flight.begin(1, 1, text_of("g" * 20, "x" * 500))
        (one,) = page.flight.read()
        assert one.group == "g" * 20 and one.what == "x" * (TEXT_SIZE_BYTES - 21)
