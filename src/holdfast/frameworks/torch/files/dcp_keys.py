"""Dictionaries that a torch DCP directory cannot say.

Theory. DCP flattens dictionaries: every key is written as text (``{1: "a"}`` comes back as ``{"1": "a"}``), a
``Counter`` becomes a dict, and an empty dictionary vanishes. The milestones of a ``MultiStepLR`` are a ``Counter`` of
numbers: as text none of them would be met again. So what they were is noted beside the tree, as one value under
:data:`KEYS`; torch reads such a directory as before.

Invariants:
1. ``restore_keys`` of what DCP makes of ``{**tree, KEYS: note_keys(tree)}`` has the containers and keys of ``tree``.
   Without a note it is as read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.errors import CheckpointInvalid, StateError

KEYS = "holdfast.keys"
"""Where the note is, beside ``model`` and the others."""
_Note = dict[tuple[str, ...], tuple[str, list[Any]]]


def note_keys(tree: Mapping[Any, Any]) -> list[Any]:
    """Path, kind and keys of every container that would not come back as it is; empty when all would.

    Raises:
        StateError: two keys of one dictionary are the same text.
    """
    return list(_noted(tree, ()))


def _noted(node: Any, path: tuple[str, ...]) -> Iterator[list[Any]]:
    items = _items(node)
    if items is None:
        return
    texts = [str(key) for key in items]
    if len(set(texts)) < len(texts):
        raise StateError(
            f"{'.'.join(path)} has two keys that are one as text, which a DCP directory cannot hold",
            hint="export it --to torch",
        )
    other_keys = isinstance(node, Mapping) and any(type(key) is not str for key in node)
    if other_keys or isinstance(node, Counter) or any(map(_vanishes, (node, *items.values()))):
        yield [list(path), type(node).__name__, list(items)]
    for text, value in zip(texts, items.values(), strict=True):
        yield from _noted(value, (*path, text))


def _items(node: Any) -> dict[Any, Any] | None:
    """What a container holds by key or position; None for what DCP does not look into."""
    if isinstance(node, list):
        return dict(enumerate(node))
    return dict(node) if isinstance(node, Mapping) else None


def _vanishes(node: Any) -> bool:
    """True when DCP writes nothing for a container."""
    items = _items(node)
    return items is not None and node != [] and all(map(_vanishes, items.values()))


def restore_keys(tree: dict[str, Any], where: str) -> dict[str, Any]:
    """The tree with what was noted, and without the note.

    Raises:
        CheckpointInvalid: the note is not one of ours.
    """
    rest = dict(tree)
    noted = rest.pop(KEYS, [])
    try:
        note: _Note = {tuple(path): (kind, keys) for path, kind, keys in noted}
        made: dict[str, Any] = _restored(rest, (), note)
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise CheckpointInvalid(f"{where}: {KEYS} does not fit the rest ({error!r})") from error
    return made


def _restored(node: Any, path: tuple[str, ...], note: _Note) -> Any:
    items = _items(node)
    if items is None:
        return node
    kind, keys = note.get(path, (type(node).__name__, list(items)))
    by_text = {str(key): value for key, value in items.items()}
    made: dict[Any, Any] = {}
    for key in keys:
        inner = (*path, str(key))
        # What vanished is noted, and empty.
        value = by_text[str(key)] if inner not in note else by_text.get(str(key), {})
        made[key] = _restored(value, inner, note)
    if kind == "list":
        return list(made.values())
    return Counter(made) if kind == "Counter" else made
