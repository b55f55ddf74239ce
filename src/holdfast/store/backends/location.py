"""The location of checkpoints: a path of this machine, or the URL of a store (``s3://bucket/prefix``).

A path and a :class:`Url` both have the operator ``/``, the properties ``name`` and ``parent``, and a text form by
``str``. Code that uses only these members works with both types.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Self, TypeAlias

import msgspec

from holdfast.errors import UsageError

ROOT_VARIABLE = "HOLDFAST_CHECKPOINT"
"""Name of the environment variable for the location of checkpoints. Its value replaces the location in the script."""
SCHEMES = ("faulty", "s3")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_PART = re.compile(r"[A-Za-z0-9._-][A-Za-z0-9._=+-]*")


class Url(msgspec.Struct, frozen=True):
    """The URL of a store, or of an entry in it. ``parts`` are the names between the slashes, the bucket first."""

    scheme: str
    parts: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the URL in a text ``scheme://bucket/prefix/...``.

        Raises:
            UsageError: the scheme is unknown, or the text has credentials, a port, a query or an invalid name. The
                message does not repeat the text, because it may hold a secret.
        """
        match = _URL.fullmatch(text)
        if match is None or match[1].lower() not in SCHEMES:
            kind = f"{match[1]}://" if match else "this text"
            raise UsageError(f"no store for {kind}", hint="write a directory, or s3://bucket/prefix")
        scheme, rest = match[1].lower(), match[2].rstrip("/")
        if "@" in rest or "?" in rest or ":" in rest:
            raise UsageError(
                f"an {scheme}:// URL with credentials, a port or a query in it is refused (it would end up in logs)",
                hint="write s3://bucket/prefix; credentials and AWS_ENDPOINT_URL come from the environment",
            )
        parts = tuple(rest.split("/"))
        if any(not _PART.fullmatch(part) or part in (".", "..") for part in parts):
            raise UsageError(
                f"a {scheme}:// URL needs a bucket, and names of letters, digits and . _ - = + between slashes",
                hint="write s3://bucket/prefix",
            )
        return cls(scheme, parts)

    def __truediv__(self, name: str) -> Url:
        return Url(self.scheme, (*self.parts, name))

    @property
    def name(self) -> str:
        """The last component of the URL: the bucket, or the name after the last slash."""
        return self.parts[-1]

    @property
    def parent(self) -> Url:
        """The URL without its last component. A bucket is its own parent."""
        return Url(self.scheme, self.parts[:-1] or self.parts)

    def __str__(self) -> str:
        return f"{self.scheme}://{'/'.join(self.parts)}"


Place: TypeAlias = Path | Url


def is_path(text: str) -> bool:
    """Return True if ``text`` is a path of this machine, and False if it is the URL of a store."""
    return _URL.match(text) is None


def place_of(where: Place | str | os.PathLike[str]) -> Place:
    """Return the path or :class:`Url` of a location that a user named.

    Raises:
        UsageError: the text is empty, a URL is invalid (see :meth:`Url.parse`), ``pathlib`` removed a slash from a
            URL, or a path is not valid Unicode.
    """
    if isinstance(where, Url):
        return where
    text = os.fspath(where)
    if not text:
        raise UsageError(
            "an empty text names no place for checkpoints",
            hint=f"write a directory ('.' is this one), or unset an empty {ROOT_VARIABLE}",
        )
    if not is_path(text):
        return Url.parse(text)
    if text.startswith(tuple(f"{scheme}:/" for scheme in SCHEMES)):
        raise UsageError(
            f"{text.partition(':')[0]}:/ lacks a slash", hint="give the URL as text, not as pathlib.Path"
        )
    return _sayable(Path(text))


def absolute(where: Place | str | os.PathLike[str]) -> Place:
    """Return the location that a user named, as an absolute path or a :class:`Url`.

    Raises:
        UsageError: the text is empty, a URL is invalid, or a path is not valid Unicode.
    """
    place = place_of(where)
    return _sayable(place.absolute()) if isinstance(place, Path) else place


def _sayable(path: Path) -> Path:
    """Return ``path`` unchanged, if messages and JSON can contain it.

    Raises:
        UsageError: ``path`` is not valid Unicode.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{str(path)!r} is no valid Unicode: the processes of a job cannot tell each other of it",
            hint="rename it, or reach it through a symbolic link with another name",
        ) from None
    return path
