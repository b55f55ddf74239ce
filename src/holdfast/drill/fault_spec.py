"""The grammar of the option ``--fault``, and the faults as data (pure).

    KIND:rank=R@step=N[,phase=P]        one fault
    KIND:rank=R@every=N[,phase=P]       one fault after every N steps
    flip:rank=R@step=N[,of=optimizer]   one bit of a weight (or of the optimizer's state) changes

KIND is a death, a hang or a flip:

- deaths: ``kill`` (SIGKILL from outside), ``exception`` (an unhandled exception in the training script), ``exit``
  (``os._exit(1)``);
- hangs: ``stop`` (SIGSTOP from outside), ``loop`` (an endless loop in Python), ``gil`` (C code that never releases the
  GIL), ``deadlock`` (the rank waits for a message that no rank sends; drill model only), ``loader`` (the data loader
  never yields);
- ``flip``: a bit in the memory of a rank that continues to run (drill model only).

R is a rank, ``random``, or several ranks joined by ``+`` (hit at the same time). P is a phase, or ``random``: a phase
that every step has. A kill or stop without a phase comes at a random moment of the step. The phases of the block of
step N are ``forward``, ``backward``, ``vote``, ``update`` and ``commit``. The phases outside of a block are:

- ``ready``: the block of step N - 1 has ended, and the code of the script after it follows;
- ``loading``: the script asks for the batch of step N;
- ``save``: the session saves a checkpoint of step N;
- ``section``: a section that the script has announced begins;
- ``epoch``: the loop over the steps of an epoch has ended, and the code of the script after this loop follows.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from holdfast.errors import UsageError

Death = Literal["kill", "exception", "exit"]
Hang = Literal["stop", "loop", "gil", "deadlock", "loader"]
Flip = Literal["flip", "flip-optimizer"]
Kind = Death | Hang | Flip
DEATHS: tuple[Death, ...] = get_args(Death)
HANGS: tuple[Hang, ...] = get_args(Hang)
FLIPS: tuple[Flip, ...] = get_args(Flip)
KINDS: tuple[Kind, ...] = (*DEATHS, *HANGS, *FLIPS)
FROM_OUTSIDE = ("kill", "stop")
STEP_PHASES = ("forward", "backward", "vote", "update", "commit", "ready")
"""Phases that every step has, whatever the script does."""
PHASES = (*STEP_PHASES, "save", "loading", "section", "epoch")
MOMENT = "moment"
"""The phase of a fault that comes after a random delay, in whatever phase the step is then."""
DOUBT = "doubt"
"""The moment at which some ranks know that the vote passed and another rank does not know yet (soak only)."""
UNVOTED = "unvoted"
"""The moment at which the victim is about to vote, and another rank waits in the same vote (soak only)."""
EXAMPLE = "kill:rank=2@step=20"


@dataclass(frozen=True)
class FaultSpec:
    """One ``--fault`` as typed. ``ranks`` is empty for a random rank; ``phase`` is empty if none was given.

    ``step`` is the step of the fault, or, if ``every`` is set, the number of steps between two faults.
    """

    text: str
    kind: Kind
    ranks: tuple[int, ...]
    step: int
    every: bool
    phase: str


@dataclass(frozen=True)
class InjectedFault:
    """One fault to inject, at the phase ``phase`` of the first step from ``step`` on.

    Three values of ``phase`` are not phases of a step: :data:`MOMENT` (a random moment), :data:`DOUBT` (a moment at
    which only some ranks know that the vote passed) and :data:`UNVOTED` (the victim has not voted, and another rank
    waits in the vote).
    """

    kind: Kind
    ranks: tuple[int, ...]
    step: int
    phase: str

    def __str__(self) -> str:
        ranks = "+".join(map(str, self.ranks))
        where = "" if self.phase == MOMENT else f",phase={self.phase}"
        return f"{self.kind}:rank={ranks}@step={self.step}{where}"


def parse_fault(text: str) -> FaultSpec:
    """Return the parts of one ``--fault``.

    Raises:
        UsageError: the text does not follow the grammar; the error names the wrong part.
    """
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise _wrong(text, f"unknown kind {kind!r}: one of {', '.join(KINDS)}")
    fields: dict[str, str] = {}
    for part in rest.replace("@", ",").split(","):
        key, equals, value = part.partition("=")
        if not equals or key not in ("rank", "step", "every", "phase", "of") or key in fields:
            raise _wrong(text, f"cannot read {part!r}: rank=, step= or every=, phase=, each once")
        fields[key] = value
    if "of" in fields:
        if kind != "flip" or fields["of"] not in ("weights", "optimizer"):
            raise _wrong(text, f"of={fields['of']}: a flip is of=weights or of=optimizer")
        kind = "flip-optimizer" if fields["of"] == "optimizer" else "flip"
    if ("step" in fields) == ("every" in fields):
        raise _wrong(text, "needs step=N or every=N")
    every = "every" in fields
    phase = fields.get("phase", "")
    if phase and phase not in (*PHASES, "random"):
        raise _wrong(text, f"unknown phase {phase!r}: one of {', '.join(PHASES)}, random")
    ranks = _ranks(text, fields.get("rank", "random"))
    if len(ranks) > 1 and kind not in FROM_OUTSIDE:
        raise _wrong(text, "several ranks can only be killed or stopped")
    if kind in ("loader", *FLIPS) and phase:
        raise _wrong(text, f"a {kind} has no phase of the step")
    step = _whole(text, fields["every" if every else "step"])
    if every and step == 0:
        raise _wrong(text, "every=0")
    return FaultSpec(text, _kind(kind), ranks, step, every, phase)


def check(spec: FaultSpec, *, world_size: int, steps: int | None) -> None:
    """Refuse a fault that would never happen. ``steps``: number of steps of the run; None if unknown yet.

    Raises:
        UsageError: the fault names a rank or a step that the run does not have.
    """
    if any(rank >= world_size for rank in spec.ranks):
        raise _wrong(spec.text, f"the run has ranks 0 to {world_size - 1} (--nproc {world_size})")
    if steps is not None and spec.step >= steps:
        raise _wrong(spec.text, f"the run ends at step {steps} (--steps): the fault would never come")


def expand(specs: Iterable[FaultSpec], *, world_size: int, steps: int, seed: int) -> list[InjectedFault]:
    """Return the faults to inject, sorted by step. Random ranks and phases are drawn from ``seed``.

    Raises:
        UsageError: a fault names a rank or a step that the run does not have.
    """
    draw = random.Random(seed)
    faults: list[InjectedFault] = []
    for spec in specs:
        check(spec, world_size=world_size, steps=steps)
        places = range(spec.step, steps, spec.step) if spec.every else (spec.step,)
        for step in places:
            ranks = spec.ranks or (draw.randrange(world_size),)
            faults.append(InjectedFault(spec.kind, ranks, step, _phase(spec, draw)))
    return sorted(faults, key=lambda fault: fault.step)


def _phase(spec: FaultSpec, draw: random.Random) -> str:
    if spec.kind == "loader":
        return "loading"
    if spec.phase in PHASES:
        return spec.phase
    if spec.kind in ("deadlock", *FLIPS):
        return "forward"
    if spec.phase == "random" or spec.kind not in FROM_OUTSIDE:
        return draw.choice(STEP_PHASES)
    return MOMENT


def _kind(text: str) -> Kind:
    return next(kind for kind in KINDS if kind == text)


def _ranks(text: str, value: str) -> tuple[int, ...]:
    if value == "random":
        return ()
    ranks = tuple(_whole(text, part) for part in value.split("+"))
    if len(set(ranks)) != len(ranks):
        raise _wrong(text, "names a rank twice")
    return ranks


def _whole(text: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise _wrong(text, f"{value!r} is not a number")
    return int(value)


def _wrong(text: str, what: str) -> UsageError:
    return UsageError(
        f"--fault {text}: {what}", hint=f"for example --fault {EXAMPLE}, or kill:rank=random@every=30"
    )
