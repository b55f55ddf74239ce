"""The history of the benches: well-formed records, and the diagram made from them."""

from __future__ import annotations

import re
from datetime import date

from scripts.bench_plots import COLUMNS, PICTURE, figures, rows, svg_of


def test_each_record_has_a_date_a_claim_and_numbers() -> None:
    records = rows()
    assert len(records) > 300
    for record in records:
        assert tuple(record) == COLUMNS
        date.fromisoformat(record["date"])
        assert record["claim"] and record["series"] and record["command"]
        assert re.fullmatch(r"[0-9a-f]{7,40}|", record["commit"])
        for name in ("n", "min", "value", "p90", "max"):
            assert record[name] == "" or float(record[name]) >= 0, record


def test_the_picture_is_that_of_the_history() -> None:
    assert PICTURE.read_text() == svg_of(rows()), "make bench-plots"


def test_a_figure_is_drawn_from_its_second_run_on() -> None:
    record = dict.fromkeys(COLUMNS, "") | {"claim": "c", "series": "s", "unit": "ms"}
    later = record | {"date": "2026-01-02", "value": "4"}
    first = record | {"date": "2026-01-01", "value": "2"}
    assert figures([later]) == []
    assert figures([later, first])[0].values == [2.0, 4.0]
