"""Log following: no line is repeated or missing, over attempts and half-written lines."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.screen.log_tail import UPDATED_PERIOD_S, FileTail, LogTail, attempts, ranks_of
from holdfast.runtime.node.rundir import LAST_LINES, last_lines


def log(root: Path, attempt: int, rank: int, text: str) -> Path:
    path = root / f"attempt-{attempt:03d}" / f"rank-{rank:05d}.log"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(text)
    return path


def test_lines_come_once_and_whole(tmp_path: Path) -> None:
    tail = LogTail(tmp_path, lambda attempt, rank: rank == 0)
    assert list(tail.poll()) == []
    log(tmp_path, 0, 0, "one\ntw")
    log(tmp_path, 0, 1, "not shown\n")
    assert list(tail.poll()) == [(0, "one")]
    log(tmp_path, 0, 0, "o\n")
    assert list(tail.poll()) == [(0, "two")]
    assert list(tail.poll()) == []


def test_a_new_attempt_ends_the_one_before(tmp_path: Path) -> None:
    tail = LogTail(tmp_path, lambda attempt, rank: True)
    log(tmp_path, 0, 1, "before\n")
    assert list(tail.poll()) == [(1, "before")]
    log(tmp_path, 0, 1, "last words without an end")
    log(tmp_path, 1, 0, "after\n")
    assert list(tail.poll()) == [(1, "last words without an end"), (0, "after")]


def test_whose_log_it_is_may_be_known_late(tmp_path: Path) -> None:
    known = False
    tail = LogTail(tmp_path, lambda attempt, rank: known)
    log(tmp_path, 0, 0, "before\n")
    assert list(tail.poll()) == []
    known = True
    log(tmp_path, 1, 0, "after\n")
    assert list(tail.poll()) == [(0, "before"), (0, "after")]


def test_what_is_there(tmp_path: Path) -> None:
    log(tmp_path, 10, 3, "")
    log(tmp_path, 2, 0, "")
    (tmp_path / "attempt-x").mkdir()
    assert attempts(tmp_path) == [2, 10]
    assert ranks_of(tmp_path, 10) == [3]
    assert attempts(tmp_path / "nowhere") == [] and ranks_of(tmp_path, 99) == []


def test_last_lines(tmp_path: Path) -> None:
    path = log(tmp_path, 0, 0, "".join(f"line {n}\n" for n in range(100_000)))
    assert last_lines(path) == [f"line {n}" for n in range(100_000 - LAST_LINES, 100_000)]
    assert last_lines(tmp_path / "nothing") == []


def test_a_progress_bar_is_one_line() -> None:
    now_s = 0.0
    tail = FileTail(Path("fed by hand"), lambda: now_s)
    assert tail.feed(b"start\r\n" + b"".join(b"\r%d%%" % n for n in range(50))) == ["start"]
    now_s += UPDATED_PERIOD_S
    assert tail.feed(b"\r50%") == ["50%"]
    now_s += UPDATED_PERIOD_S
    assert tail.feed(b"") == tail.feed(b"\r51%") == [], "it stands still; from now on it moves"
    assert tail.feed(b"\r100%\nnext\n") == ["100%", "next"]
    assert tail.feed(b"1 of 2\r2 of 2\r") == [] and list(tail.drain()) == ["2 of 2"]
    now_s += UPDATED_PERIOD_S
    assert tail.feed(b"a line that nobody replaces") == []


LINES = st.lists(st.text(st.characters(blacklist_characters="\r\n", codec="utf-8"), max_size=20), max_size=20)


@given(LINES, st.sampled_from(["\n", "\r\n", "\rlast state\n", "\r\r\n"]), st.data())
def test_any_cut_gives_the_same_lines(lines: list[str], end: str, data: st.DataObject) -> None:
    raw = "".join(f"{line}{end}" for line in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=5)))
    tail, found = FileTail(Path("fed by hand")), []
    for start, stop in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        found += tail.feed(raw[start:stop])
    assert found == (["last state"] * len(lines) if "last" in end else lines)


def test_a_progress_bar_has_a_newest_state_until_its_end(tmp_path: Path) -> None:
    tail = LogTail(tmp_path, lambda attempt, rank: True)
    log(tmp_path, 0, 0, "start\n 0%\r 10%\r 20%")
    log(tmp_path, 0, 1, "a line without an end")
    assert list(tail.poll()) == [(0, "start")]
    assert tail.updated() == [(0, " 20%")]
    log(tmp_path, 0, 0, "\r 100%\n")
    assert list(tail.poll()) == [(0, " 100%")]
    assert tail.updated() == []
