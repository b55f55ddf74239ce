"""Faults of processes in a simulated run, as data.

The kinds of faults follow failure studies of training clusters, within the limits of the simulation. A process dies in
any phase, raises, exits without an error message, hangs, or a bit of its memory flips. A collective breaks although no
process died. A save fails. A controller or an agent dies while it is needed.
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
    "stop",  # SIGSTOP: the process lives but never answers again
    "glitch",  # a collective breaks, no process dies
    "save_error",  # the next share of this rank cannot be written
    "controller",  # the controller dies; its agent starts the next term
    "agent",  # the agent of the rank's node dies; the launcher starts a successor
    "flip",  # a bit in the state of a living rank changes
    "groups",  # a rank makes a process group that a replacement will not make
    "spare",  # a spare on the rank's node dies
    "ask_exit",  # a user requests a graceful exit
]
WORKER_KINDS: tuple[FaultKind, ...] = ("kill", "exit", "raise", "stop", "glitch", "save_error", "flip")
STATES: tuple[RankState, ...] = ("starting", "ready", "compute", "voting", "updating", "in_doubt", "aborted")


class SimFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault of one rank. All times are virtual seconds.

    Attributes:
        kind: what happens.
        at_s: time of the fault. With a ``state`` it is the time from which the fault waits for that state.
        rank: the rank that the fault strikes; for an agent or a spare, a rank on its node.
        state: the fault strikes when the rank enters this state of the step protocol; empty if it waits for no state.
        delay_s: time between the entry into ``state`` and the fault.
    """

    kind: FaultKind
    at_s: float
    rank: int = 0
    state: RankState | Literal[""] = ""
    delay_s: float = 0.0


def random_faults(rng: random.Random, ranks: int, horizon_s: float, count: int) -> tuple[SimFault, ...]:
    """Return ``count`` random faults of a job of ``ranks`` ranks, in the order of their times.

    Most strike within ``horizon_s`` virtual seconds. Some strike shortly after another fault.
    """
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
