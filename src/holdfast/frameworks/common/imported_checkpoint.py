"""A writer of checkpoints from another program's state, in one process and outside of any run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.core.ids import STEP_MAX, Generation, SaveId
from holdfast.errors import UsageError
from holdfast.frameworks.common.adapter import Collected
from holdfast.frameworks.common.state_tree import Plain
from holdfast.store.backends.location import Place
from holdfast.store.layouts.layout import Catalogue
from holdfast.store.layouts.save_plan import plan
from holdfast.store.manage.checkpoint_root import Root
from holdfast.store.read.validation import inspect
from holdfast.store.write.writer import write_share

Progress = Callable[[int], object]


def import_id(step: int) -> SaveId:
    """Return the id of the save of an imported state after ``step`` updates.

    Raises:
        UsageError: ``step`` is negative, or too large for a checkpoint.
    """
    if not 0 <= step <= STEP_MAX:
        raise UsageError(f"step {step} cannot be saved", hint=f"give the updates done, 0 to {STEP_MAX}")
    return SaveId("imported", Generation(0, 0), step, 0, "request")


def write_imported(
    root: Place,
    step: int,
    collected: Collected,
    values: Mapping[str, Plain],
    progress: Callable[[int], Progress] = lambda size_bytes: int,
) -> Place:
    """Write the state ``collected`` as a checkpoint below ``root``, as a session would after ``step`` updates.

    Args:
        values: plain values as a session writes them, without the entry ``session``.
        progress: called with the total size in bytes. The function that it returns is called with the size of each
            written part.

    Returns:
        The place of the checkpoint.

    Raises:
        UsageError: ``step`` is out of range, or an import of this step exists or is being written.
        StateError: a checkpoint cannot hold a value; the error names the value.
        StoreWriteError: ``root`` cannot be written.
    """
    catalogue = Catalogue.from_layouts({0: collected.layout(0, 1)})
    save_id = import_id(step)
    _make_way(root, save_id)
    session = {"step": step, "seed": 0, "world": 1, "place": {"loop": -1}}
    write_share(
        root, save_id, catalogue, plan(catalogue, frozenset({0})), 0, collected, {**values, "session": session},
        {0: {}}, progress=progress(catalogue.size_bytes),
    )  # fmt: skip
    return root / save_id.directory()


def _make_way(root: Place, save_id: SaveId) -> None:
    """Remove the unfinished files that a failed or killed import of the same step has left.

    Raises:
        UsageError: a finished import exists, or another process is writing one.
    """
    store, name = Root(root), save_id.directory()
    if name in store.names() and not (inspect(root / name).unfinished and store.discard(save_id)):
        raise UsageError(f"{root / name} exists", hint="name another directory or --step")
