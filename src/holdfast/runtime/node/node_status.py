"""The state of this node in words, and its newest committed step, from the status pages of its workers."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.job.spares import is_spare
from holdfast.core.protocol.status_page import Phase, Word, unpack_state
from holdfast.runtime.node.rundir import PAGE, RunDir
from holdfast.runtime.node.status_page import committed_step, each_page

_HELD = frozenset({Phase.ABORTED, Phase.IN_DOUBT, Phase.TORN})
_OVER = frozenset({Phase.FINISHED, Phase.LEFT, Phase.AFTER})


class NodeStatus(NamedTuple):
    """The state of a node.

    ``state``: ``waiting`` (no rank is on the node), ``starting``, ``training``, ``recovering``, ``leaving`` (a notice
    is in force), ``finished`` or ``ended``. ``step``: the newest step that a rank of the node has committed. ``first``:
    True if rank 0 is on the node.
    """

    state: str
    step: int
    first: bool


def node_status(run: RunDir, *, leaving: bool) -> NodeStatus:
    """Return the state of this node. ``leaving`` is True while a notice that the node will leave is in force."""
    newest: dict[int, tuple[int, Phase, bool]] = {}  # by rank: member, phase, fenced
    for page in each_page(run.pages_link, PAGE):
        member, rank = page[Word.MEMBER], page[Word.RANK]
        if not is_spare(member) and member >= newest.get(rank, (0,))[0]:
            newest[rank] = (member, unpack_state(page[Word.STATE])[1], page[Word.FENCED] > 0)
    phases = {phase for _, phase, _ in newest.values()}
    if not newest:
        state = "waiting"
    elif any(fenced for _, _, fenced in newest.values()) or phases & _HELD:
        state = "recovering"
    elif Phase.STARTING in phases:
        state = "starting"
    else:
        state = "finished" if phases <= _OVER else "training"
    return NodeStatus(
        "leaving" if leaving else state, committed_step(each_page(run.pages_link, PAGE)), 0 in newest
    )
