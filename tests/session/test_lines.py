"""The lines of Holdfast in the log of a script."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from holdfast.session.api import configure_logging

log = logging.getLogger("holdfast")


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """Yield the root logger without handlers, with Holdfast's logger as in a new process. Restore both."""
    root = logging.getLogger()
    kept = [(each, each.handlers[:], each.filters[:], each.level, each.propagate) for each in (root, log)]
    for each in (root, log):
        each.handlers, each.filters = [], []
    log.propagate = True
    yield root
    for each, each.handlers, each.filters, level, each.propagate in kept:
        each.setLevel(level)


@pytest.mark.parametrize(
    ("form", "line"),
    [
        ("[%(name)s][%(levelname)s] - %(message)s", "[holdfast][WARNING] - rank 1 was replaced"),
        ("%(levelname)s %(message)s", "WARNING holdfast: rank 1 was replaced"),
    ],
)
def test_a_root_logger_that_shows_names_does_not_double_ours(
    root: logging.Logger, form: str, line: str
) -> None:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter(form))
    root.addHandler(handler)
    configure_logging()
    configure_logging()
    log.warning("holdfast: rank %d was replaced", 1)
    assert text.getvalue() == line + "\n"
