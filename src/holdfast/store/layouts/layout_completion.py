"""Completion of the layouts of ranks that had no time to publish the entries of their optimizer.

Theory. Optimizer state appears with the first update, so each rank declares its layout again after that update. A rank
that died or was in doubt before this second declaration has (or will have) the same entries as the other ranks. An
entry with the shape of its parameter has the same box as the parameter; a rank holds any other entry whole. So the
missing declarations follow from one complete declaration, and every rank computes the same result. An optimizer that
cuts its state in its own way has other boxes. If one declared entry shows this, no rank's layout is completed with that
entry. The entries of a sharded optimizer are never completed.

An optimizer may also keep the whole state of a parameter on one rank, which sends its update to the others (Muon).
Then each of two ranks has entries that the other lacks. A rank that is only late lacks entries of the others, but the
others have all of its entries. So no rank's layout is completed with the entries of an optimizer for which two ranks
lack entries of each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.core.protocol.layout_messages import Layout
from holdfast.store.layouts.layout import Catalogue, Declaration, Row, declarations
from holdfast.store.layouts.shardings import Cuts, whole_cuts

PREFIX = "optimizer."
SHARDED = "(sharded)"
"""End of the name of an optimizer that keeps the state of a parameter on some of the parameter's holders only.

Layouts are not completed with entries of such an optimizer.
"""


def catalogue_of(layouts: Mapping[int, Layout]) -> Catalogue:
    """Return the catalogue of the published layouts (by rank), with the optimizer entries that some ranks lack.

    Raises:
        StateError: a declaration breaks an invariant of ``layout.py``, or two ranks disagree about a tensor.
    """
    return Catalogue.from_declarations(complete(declarations(layouts)))


def complete(declared: Mapping[int, Declaration]) -> dict[int, Declaration]:
    """Return ``declared`` (by rank) with the optimizer entries that some ranks have not declared yet."""
    known: dict[str, Row] = {}
    cut: set[str] = set()
    tables = {id(each.tensors): each for _, each in sorted(declared.items(), reverse=True)}
    distinct = sorted(tables.values(), key=lambda each: each.rank)
    placed = [_places(declaration) for declaration in distinct]
    for declaration, places in zip(distinct, placed, strict=True):
        for row in declaration.tensors:
            optimizer = optimizer_of(row.fqn)
            if optimizer and not optimizer.endswith(SHARDED):
                known.setdefault(row.fqn, row)
                if not _follows(row, declaration, places):
                    cut.add(row.fqn)
    known = {fqn: row for fqn, row in known.items() if fqn not in cut}
    apart = _kept_apart(known, placed)
    known = {fqn: row for fqn, row in known.items() if optimizer_of(fqn) not in apart}
    completed: dict[tuple[int, int], tuple[tuple[Row, ...], tuple[Cuts, ...]]] = {}
    out: dict[int, Declaration] = {}
    for rank, declaration in declared.items():
        key = (id(declaration.tensors), len(declaration.cells))
        if key not in completed:
            completed[key] = _completed(declaration, known)
        rows, cells = completed[key]
        out[rank] = Declaration(
            declaration.rank, declaration.world, declaration.cells + cells, declaration.boxes, rows
        )
    return out


def _completed(
    declaration: Declaration, known: Mapping[str, Row]
) -> tuple[tuple[Row, ...], tuple[Cuts, ...]]:
    """Return the completed table of a declaration, and the cells (parts of a regular cut) that it needs in addition."""
    places = _places(declaration)
    cells: dict[Cuts, int] = {}
    added: list[Row] = []
    for row in known.values():
        parameter = parameter_of(row.fqn, places)
        if row.fqn in places or parameter is None:  # declared already, or of another pipeline stage
            continue
        if row.shape and row.shape == places[parameter][0].shape:
            added += [Row(row.fqn, row.dtype, row.shape, at.place) for at in places[parameter]]
        else:
            whole = whole_cuts(len(row.shape))
            place = cells.setdefault(whole, len(declaration.cells) + len(cells))
            added.append(Row(row.fqn, row.dtype, row.shape, place))
    return (declaration.tensors + tuple(added) if added else declaration.tensors), tuple(cells)


def _kept_apart(known: Mapping[str, Row], each: Sequence[Mapping[str, list[Row]]]) -> set[str]:
    """Return the names of the optimizers for which two ranks each lack an entry that the other rank has.

    Only the entries of parameters that a rank holds count as missing on this rank.

    Args:
        known: the entries of all optimizers by name.
        each: the declared tensors of the ranks by name, one for each distinct declaration.
    """
    # By optimizer: the entries that each rank has, and those that it lacks.
    sides: dict[str, list[tuple[set[str], set[str]]]] = {}
    for places in each if len(each) > 1 else ():
        has: dict[str, set[str]] = {}
        lacks: dict[str, set[str]] = {}
        for fqn in known:
            if fqn in places:
                has.setdefault(optimizer_of(fqn), set()).add(fqn)
            elif parameter_of(fqn, places) is not None:
                lacks.setdefault(optimizer_of(fqn), set()).add(fqn)
        for name in has.keys() & lacks.keys():
            sides.setdefault(name, []).append((has[name], lacks[name]))
    return {
        name
        for name, found in sides.items()
        if any(a[0] & b[1] and b[0] & a[1] for number, a in enumerate(found) for b in found[:number])
    }


def optimizer_of(fqn: str) -> str:
    """Return the optimizer in the name of its entry, ``optimizer.<name>.<parameter>.<key>``; empty for other names."""
    return fqn.split(".", 2)[1] if fqn.startswith(PREFIX) else ""


def _places(declaration: Declaration) -> dict[str, list[Row]]:
    places: dict[str, list[Row]] = {}
    for row in declaration.tensors:
        places.setdefault(row.fqn, []).append(row)
    return places


def _follows(row: Row, declaration: Declaration, places: Mapping[str, list[Row]]) -> bool:
    """Return True if an optimizer entry is whole, has its parameter's box, or has no declared parameter."""
    if declaration.box(row).sizes == row.shape:
        return True
    parameter = parameter_of(row.fqn, places)
    return parameter is None or row.place in {at.place for at in places[parameter]}


def parameter_of(fqn: str, places: Mapping[str, object]) -> str | None:
    """Return the declared parameter in the name ``optimizer.<name>.<parameter>.<key>``; None if it is not declared."""
    rest = fqn.removeprefix(PREFIX).partition(".")[2]
    while "." in rest:
        rest = rest.rpartition(".")[0]
        if rest in places:
            return rest
    return None
