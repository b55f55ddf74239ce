"""Fixtures: a server of objects, and a new bucket in it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from holdfast.store.backends.location import Url
from tests.store import s3server


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """Yield the URL of one server for all tests."""
    with s3server.server() as url:
        yield url


@pytest.fixture
def bucket(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Url:
    """Make a bucket. Return a root in it, and set the environment to its server."""
    for name, value in s3server.environment(s3_url).items():
        monkeypatch.setenv(name, value)
    name = f"b{secrets.token_hex(6)}"
    s3server.make_bucket(s3_url, name)
    return Url.parse(f"s3://{name}/some/prefix")
