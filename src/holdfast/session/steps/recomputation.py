"""The check of devices: each rank also runs blocks of other ranks, and the gradients are compared.

Theory. ``core/watch/recomputation.py`` has the rules. A *copy* is one data-parallel replica of the model. At a step
that is due, each rank runs the block twice as a check run, without peers and without effect. The first run has the
rank's own batch and random numbers, the second one those of the next copy. Then all ranks sum their digests in one
all-reduce, called a *meeting* here. If two ranks differ on a batch, each rank also runs the block of the copy after the
next one, and the ranks meet again.

Invariants:
1. At a step that is due, all ranks meet at the start of each run of the block for the job, even without new results.
   A replacement does not know of earlier meetings.
2. A rank that two other ranks contradict does not begin the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.core.protocol.health_messages import ranks_text
from holdfast.core.watch.recomputation import (
    AT_FIRST,
    OFFSETS,
    Ran,
    RecomputationVerdict,
    encode,
    owner_of,
    read,
)
from holdfast.errors import ComputeError, StepError, UnsupportedError
from holdfast.frameworks.common.optional_abilities import (
    DigestsBatches,
    ForeignBlocks,
    ProvesBlocks,
    StandsForOthers,
)

if TYPE_CHECKING:
    from holdfast.session.steps.step import Step

log = logging.getLogger("holdfast")

_LEAVES_OUT = "session(verify_ranks=0) leaves out this check"


class Recomputation:
    """The device checks of one session.

    Args:
        adapter: the framework.
        every: steps between two checks; 0 means no checks.
        batch_of: returns the batch that a model replica (by number) draws for the open step. Raises LookupError if
            the batch is not known.

    Raises:
        UnsupportedError: no rank can run the block of another rank.
    """

    def __init__(self, adapter: Any, every: int, batch_of: Callable[[int], Any]) -> None:
        self._every = every if every and adapter.world_size > 1 else 0
        self._batch_of = batch_of
        self._adapter = adapter
        others: ForeignBlocks | None = None
        if self._every:
            able = isinstance(adapter, ProvesBlocks) and isinstance(adapter, DigestsBatches)
            others = adapter.others if able and isinstance(adapter, StandsForOthers) else None
            if others is None:
                raise UnsupportedError(
                    f"session(verify_ranks={every}): no rank can run the block of another one: it holds only a part of "
                    "the model, or does so in a framework that cannot",
                    hint="verify_ranks is for DistributedDataParallel; leave it out",
                )
        self._others = others
        self._step = -1
        self._ran: dict[int, Ran | None] = {}  # by offset from this copy; None: the block could not be run
        self._asked = AT_FIRST
        self._running: tuple[int, int] | None = None  # offset, digest of the batch
        self._drew = False  # a batch of another copy was drawn, which used random numbers of this block
        self._unknown = False  # the batch of another copy is not known
        self._muted = False
        self._agreed = -1  # the step of the last check of this process in which all agreed

    def alone(self, step: Step) -> bool:
        """Return whether the block of ``step`` now begins a check run. If so, set ``step.batch`` for that run."""
        self._running = None
        others = self._others
        if others is None or not self._is_due(step) or step.parts > 1:
            return False
        for offset in range(self._asked):
            if offset in self._ran:
                continue
            if self._begin(step, others, offset):
                return True
            self._ran[offset] = None
        return False

    def note(self) -> None:
        """Keep the digest of the gradients of a check run, at the point where the block would vote."""
        if self._running is None or self._others is None:
            return
        (offset, batch), self._running = self._running, None
        gradients = self._others.gradients()
        self._ran[offset] = None if gradients is None else Ran(batch, gradients)

    def excuses(self, error: BaseException) -> bool:
        """Return whether ``error`` came in a check run, which lacks data of peers. If so, drop that run's result."""
        if self._running is None or not isinstance(error, Exception | SystemExit):
            return False
        log.debug("holdfast: the block of another rank cannot be run here: %s", error)
        self._ran[self._running[0]], self._running = None, None
        return True

    def meet(self, step: Step) -> bool:
        """Compare the results of all ranks when the block begins its run for the job.

        Returns:
            True if the block may run. False if another rank computes wrong gradients: this rank must then wait until
            that rank is replaced.

        Raises:
            PeerLost: a rank is lost.
            ComputeError: two other ranks contradict this rank.
            StepError: the ranks differ, and it is not known which rank is wrong.
        """
        others = self._others
        if others is None or not self._is_due(step):
            return True
        while True:
            verdict = read(others.sum(encode(others.copy, others.numbers, self._ran)), others.numbers)
            if verdict.outcome != "ask":
                return self._judge(step, others, verdict)
            self._asked = OFFSETS
            if self._muted or step.parts > 1 or not self._begin(step, others, OFFSETS - 1):
                self._ran[OFFSETS - 1] = None
                continue
            return True  # the block now runs for the check, and all ranks meet again after it

    @property
    def runs(self) -> bool:
        """True if the block that has begun is a check run."""
        return self._running is not None

    def _is_due(self, step: Step) -> bool:
        if step.scrap or not self._every or step.number % self._every != self._every - 1:
            return False
        if self._step != step.number:
            self._step, self._ran, self._asked = step.number, {}, AT_FIRST
        return True

    def _begin(self, step: Step, others: ForeignBlocks, offset: int) -> bool:
        if self._muted or step.uncopied:
            return False
        copy = owner_of(others.copy, offset, others.numbers)
        batch = step.batch
        if copy != others.copy:
            self._drew = True
            try:
                batch = self._batch_of(copy)
            except LookupError:
                self._unknown = True
                return False
        if not self._adapter.go_alone(first=False, suspected=False):
            return False
        step.batch = batch
        self._running = offset, self._adapter.digest_batch(batch)
        return True

    def seed(self, step: Step) -> None:
        """Seed the random numbers of the block as the model replica that draws the given batch would seed them.

        This is done in a check run, and in the run for the job if a batch of another replica was drawn before.
        """
        others = self._others
        if others is not None and (self._running is not None or self._drew):
            offset = 0 if self._running is None else self._running[0]
            others.act_as(owner_of(others.copy, offset, others.numbers), step.number)
            self._drew = False

    def _judge(self, step: Step, others: ForeignBlocks, verdict: RecomputationVerdict) -> bool:
        ranks = f"{'rank' if len(verdict.ranks) == 1 else 'ranks'} {ranks_text(verdict.ranks)}"
        if verdict.outcome == "agree":
            self._agreed = step.number
        elif verdict.outcome == "wrong":
            if others.copy in verdict.ranks:
                raise ComputeError(
                    f"step {step.number}: two other ranks agree on gradients that this rank computes otherwise from "
                    f"the same batch{'' if self._agreed < 0 else f'; all agreed at step {self._agreed}'}",
                    hint="its device or its host computes wrong numbers: have it tested; updates since the last check "
                    "that agreed may hold some",
                )
            log.error(
                "holdfast: step %d: %s wrong gradients, by the results of two other ranks",
                step.number,
                f"{ranks} computes",
            )
            return False
        elif verdict.outcome == "unclear" and self._agreed >= 0:
            raise StepError(
                f"step {step.number}: ranks compute different gradients from the batches of {ranks}, and no two of "
                f"them agree; they all did at step {self._agreed}: what was saved since may be wrong",
                hint=f"a device computes wrong numbers; with three copies or more it is named; {_LEAVES_OUT}",
            )
        elif not self._muted and (verdict.outcome != "nothing" or self._unknown):
            self._mute(step, verdict, ranks)
        return True

    def _mute(self, step: Step, verdict: RecomputationVerdict, ranks: str) -> None:
        """Stop the checks, because the results of different ranks cannot be compared in this job. Warn once."""
        self._muted = True
        why = {
            "unclear": f"ranks compute different gradients from the batches of {ranks}, and no two agree: the block "
            "depends on the rank that runs it, or kernels add in any order",
            "unlike": f"the batches of {ranks} are others when another rank draws them",
            "nothing": "what another rank draws is not known here; give s.steps a DataLoader with a "
            "DistributedSampler",
        }[verdict.outcome]
        if self._adapter.rank == 0:
            log.warning("holdfast: step %d: verify_ranks checks nothing: %s", step.number, why)
