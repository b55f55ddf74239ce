"""The record of dictionary keys and types that a torch DCP directory cannot hold.

Theory. DCP flattens dictionaries. It writes every key as text (``{1: "a"}`` comes back as ``{"1": "a"}``), a
``Counter`` becomes a dict, and an empty dictionary vanishes. The milestones of a ``MultiStepLR``, for example, are a
``Counter`` with numbers as keys: as text, no key would ever match a step. So the original keys and types are saved
beside the tree, in one value under :data:`KEYS` (the *note*). torch can still read such a directory.

Invariants:
1. DCP's result for ``{**tree, KEYS: note_keys(tree)}``, passed through ``restore_keys``, has the containers and keys of
   ``tree``. Without a note, ``restore_keys`` changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.errors import CheckpointInvalid, StateError

KEYS = "holdfast.keys"
"""Key of the note in the tree, beside ``model`` and ``optimizer``."""
_Note = dict[tuple[str, ...], tuple[str, list[Any]]]


def note_keys(tree: Mapping[Any, Any]) -> list[Any]:
    """Return path, type name and keys of every container that DCP would change; empty if there is none.

    Raises:
        StateError: two keys of one dictionary are the same as text.
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
    """Return the content of a container by key or position; None for an object that DCP does not flatten."""
    if isinstance(node, list):
        return dict(enumerate(node))
    return dict(node) if isinstance(node, Mapping) else None


def _vanishes(node: Any) -> bool:
    """Return True if DCP writes nothing for a container, because it holds no leaf; an empty list counts as a leaf."""
    items = _items(node)
    return items is not None and node != [] and all(map(_vanishes, items.values()))


def restore_keys(tree: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the tree with its original keys and types, from the note under :data:`KEYS`; remove the note.

    Raises:
        CheckpointInvalid: the note does not fit the tree; the error names ``where``.
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
        # The note has this container and DCP's result does not: it was an empty dict.
        value = by_text[str(key)] if inner not in note else by_text.get(str(key), {})
        made[key] = _restored(value, inner, note)
    if kind == "list":
        return list(made.values())
    return Counter(made) if kind == "Counter" else made
