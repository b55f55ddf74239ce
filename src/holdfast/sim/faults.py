"""What may go wrong in a simulated run, as data.

The list follows what failure studies of training clusters report, as far as the model can express it:
processes that die at any phase, that raise, leave quietly or hang, or whose memory changes; a collective that breaks
although nobody died; a save that fails; a controller or an agent that dies while it is needed.
"""

from __future__ import annotations

import random
from typing import Literal

import msgspec

from holdfast.core.protocol.messages import RankState

FaultKind = Literal[
    "kill",  # SIGKILL
    "exit",  # os._exit(1)
    "raise",  # an exception in user code, then the process exits
    "stop",  # SIGSTOP: lives, but never answers again
    "glitch",  # a collective breaks, nobody dies
    "save_error",  # the next share of this rank cannot be written
    "controller",  # the controller dies; its agent starts the next term
    "agent",  # the agent of the rank's node dies; the launcher starts a successor
    "flip",  # a bit of the state of a rank that lives on changes
    "spare",  # a spare on the rank's node dies
    "ask_exit",  # a graceful exit is asked for
]
WORKER_KINDS: tuple[FaultKind, ...] = ("kill", "exit", "raise", "stop", "glitch", "save_error", "flip")
STATES: tuple[RankState, ...] = ("starting", "ready", "compute", "voting", "updating", "in_doubt", "aborted")


class SimFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From ``at_s`` (virtual seconds) on, as soon as ``rank`` is in ``state`` (empty: any), plus
    ``delay_s``."""

    kind: FaultKind
    at_s: float
    rank: int = 0
    state: RankState | Literal[""] = ""
    delay_s: float = 0.0


def random_faults(rng: random.Random, ranks: int, horizon_s: float, count: int) -> tuple[SimFault, ...]:
    """``count`` faults within ``horizon_s`` virtual seconds; some come in pairs, close together."""
    faults: list[SimFault] = []
    at_s = 0.0
    for _ in range(count):
        at_s = at_s + rng.uniform(0.0, 0.1) if faults and rng.random() < 0.3 else rng.uniform(0.3, horizon_s)
        kind: FaultKind = rng.choice(WORKER_KINDS) if rng.random() < 0.5 else "kill"
        if rng.random() < 0.15:
            kind = "controller" if rng.random() < 0.6 else "agent"
        state: RankState | Literal[""] = "" if rng.random() < 0.4 else rng.choice(STATES)
        if rng.random() < 0.3:
            state = "voting"
        faults.append(
            SimFault(
                kind=kind, at_s=at_s, rank=rng.randrange(ranks), state=state, delay_s=rng.uniform(0.0, 0.004)
            )
        )
    return tuple(sorted(faults, key=lambda f: f.at_s))
