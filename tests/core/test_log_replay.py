"""The lines of an event log that count for a controller."""

from __future__ import annotations

from holdfast.core.job.log_replay import AFTER, NO_PLACE, LinePlace, in_force, place_of_text


def lines(*texts: str) -> list[tuple[LinePlace, dict[str, object], str]]:
    """Return lines that are written as ``place``, or as ``place<after`` for the first line of a controller."""
    found: list[tuple[LinePlace, dict[str, object], str]] = []
    for text in texts:
        place, _, after = text.partition("<")
        found.append((place_of_text(place), {AFTER: after} if after else {}, text))
    return found


def kept(*texts: str, without_place: bool = False) -> list[str]:
    return in_force(lines(*texts), without_place=without_place)


def test_the_lines_of_controllers_that_continued_each_other_count() -> None:
    log = ("1.1<0.0", "1.2", "2.1<1.2", "2.2", "3.1<2.2")
    assert kept(*log) == list(log)


def test_what_a_deposed_controller_wrote_without_the_others_is_void() -> None:
    assert kept("1.1<0.0", "1.2", "1.3", "2.1<1.1", "2.2") == ["1.1<0.0", "2.1<1.1", "2.2"]
    assert kept("1.1<0.0", "1.2", "2.1<1.2", "2.2", "3.1<1.1") == ["1.1<0.0", "3.1<1.1"]


def test_the_late_line_of_a_deposed_controller_is_void() -> None:
    assert kept("1.1<0.0", "2.1<1.1", "1.2", "2.2") == ["1.1<0.0", "2.1<1.1", "2.2"]


def test_a_controller_that_continues_its_own_lines_keeps_them() -> None:
    assert kept("1.1<0.0", "1.2", "2.1<1.2", "1.3") == ["1.1<0.0", "1.2", "2.1<1.2"]


def test_lines_without_a_place_count_on_one_node_and_for_a_controller_that_is_alone() -> None:
    assert NO_PLACE == place_of_text("0.0")
    assert kept("0.0", "0.0", without_place=True) == ["0.0", "0.0"]
    log = ("1.1<0.0", "1.2", "0.0", "2.1<1.1", "0.0")
    assert kept(*log) == ["1.1<0.0", "2.1<1.1"]
    assert kept(*log, without_place=True) == ["1.1<0.0", "0.0", "2.1<1.1", "0.0"]
