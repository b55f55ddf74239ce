"""The loops of a script over its steps: which batch comes next, and where the job is in its data.

Theory. A script may have several loops one after the other; the place of the job is the number of the loop and the
position of its feed. A process that starts again runs the script again: loops before the saved one yield nothing, the
saved one seeks. When the job goes back in place, the loop that is open does the same without starting anew.

What the script does between two loops (a scheduler's step after an epoch) it does again, too, but that is in the
state already: learning rates, schedulers, buffers and the user's state are put back when the saved loop opens, as after
a block that does not count. When all start again from between two loops, or from a step before which the script did
something, it is done again: what is saved then are copies of before (``Adapter.remember``).
Where a loop ends may be counted from where the process stands (``until=s.step + N``): the place says where the loop
began and ends, and who comes later into it takes the job's end.

Invariants:
1. A step that is tried again gets the batch that it had.
2. A loop is left only when no recovery is under way, or when it could not go back anyway. Who leaves it by ``break``
   says that it cannot any more.
3. What a script does before the block of a step is done by all ranks for the same state: a rank that has begun the
   block says so among its local values, and whoever replaces it alone does not do it again. When all start again, or go
   back to an earlier step, all do it again; learning rates, schedulers and the user's own state are those of before.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from holdfast.core.protocol.status_page import Phase
from holdfast.core.worker.position import ScriptEvent
from holdfast.errors import StepError, UsageError
from holdfast.frameworks.common.adapter import Adapter, Feed
from holdfast.frameworks.common.optional_abilities import StandsForOthers
from holdfast.frameworks.common.state_tree import Plain
from holdfast.runtime.node.status_page import LOCAL_SIZE_BYTES_MAX
from holdfast.session.checkpoints.memory_tier import MemoryTier
from holdfast.session.exit_requests import RECORD
from holdfast.session.loops.batch_digest import Drawn
from holdfast.session.loops.dataset_check import compare_with_checkpoint, compare_with_ranks
from holdfast.session.loops.loop_bounds import (
    ENDLESS,
    Bound,
    LoopMembers,
    bound_of,
    compare_bounds,
    counted_anew,
)
from holdfast.session.loops.script_source import leaves
from holdfast.session.loops.turn_position import IDIOM, TurnPosition
from holdfast.session.steps.accumulation import AccumulatingFeed, grouped
from holdfast.session.steps.batches import Batches
from holdfast.session.steps.participant import StepParticipant
from holdfast.session.steps.step import Step
from holdfast.store.format.json_values import encode_values
from holdfast.text import plural

log = logging.getLogger("holdfast")

NOT_OF_LOOPS = ("begun", "drawn", RECORD)
"""Values of one rank that are not carried from the step at which a process begins."""


class Loops:
    """All loops of one session.

    Args:
        rank, adapter: of the session.
        parts: batches in one step: ranks whose work this one does, itself included.
        tier: what is kept of each step: the job may go back to it, which a loop without a feed cannot.
        verify_data: compare what is drawn with what was drawn before.

    Attributes:
        walk: where the script is among its epochs and phases.
        own: what the user of the loop keeps of this rank alone with the step that ends next; None: nothing.
    """

    def __init__(
        self, rank: StepParticipant, adapter: Adapter, parts: int, tier: MemoryTier, verify_data: bool
    ) -> None:
        self.place: dict[str, Any] = {"loop": -1}
        self.walk = TurnPosition()
        self.local: dict[str, Plain] = {}
        self.own: Plain = None
        self._rank = rank
        self._adapter = adapter
        self._parts = self._parts_then = parts
        self._tier = tier
        self._before = LoopMembers.ANOTHER_JOB
        self._passed_over = False  # a loop, and the one where the job is has not come yet
        self._first: Bound | None = None  # of the first loop; None: not known, or of a job with other ranks
        self._anew = False  # that loop is over, and its end seems to be counted from where the job is
        self._feed: Feed | None = None
        self._others: dict[int, Feed | None] = {}  # batches of other copies, from the same loader
        self._loader: tuple[Any, int | None] = (None, None)  # of the open loop, with the batches of a step
        self.begun: Feed | None = None  # of the loader that the next loop is given: a spare has drawn from it
        self._data: list[int | str] | None = None  # of the open loop: length and content of its dataset
        self._bound: Bound = (0, None)  # of the open loop
        self._epochs: int | None = None
        self._began: tuple[Any, dict[str, Plain]] = (
            None,
            {},
        )  # position and local values at the start of the loop
        self._batches = Batches(adapter)
        self._proof = Drawn(adapter, adapter.rank, verify=verify_data)
        self._drawn, self._part = -1, 0  # the step that the batches belong to, and the next of them
        self._given: Step | None = None  # the script is at this one
        self._left_behind: Step | None = None  # it has left its loop there
        self._tried = -1  # the newest step that the script was given
        self._after: Plain = None  # state of the loader after the step that is voted on
        self._told = b""  # on the page last
        self._local_too_large = False

    def stand_at(
        self,
        session: Mapping[str, Any],
        local: Mapping[str, Any],
        *,
        begun: bool = False,
        before: LoopMembers = LoopMembers.SURVIVORS,
    ) -> None:
        """The place that was loaded, with the session's plain values.

        Args:
            begun: the block of its step was begun.
            before: who was there.
        """
        self._before = before
        self.place = dict(session.get("place", {"loop": -1}))
        self.walk.stand_at(self.place.get("turns"))
        self._rank.turns = self.walk.passed
        self._parts_then = int(session.get("parts", 1))
        world = int(session.get("world", self._adapter.world_size))
        # With other ranks a loader has another length, and an epoch another end.
        self._first = self.place.get("first") if world == self._adapter.world_size else None
        at = self.place.get("at")
        if at and "seen" not in at:
            # Nobody knows how samples are dealt; most often in turn: fewer ranks have drawn more batches each.
            then = int(session.get("world", self._adapter.world_size))
            self.place["at"] = {**at, "batch": at["batch"] * then // self._adapter.world_size}
        self.local = {key: value for key, value in local.items() if key not in NOT_OF_LOOPS}
        same = world == self._adapter.world_size and self._parts == self._parts_then
        self._proof.stand_at(local.get("drawn") if same else None)
        self.own = copy.deepcopy(self.local.get("own"))
        self._tried = int(session.get("step", 0)) - (not begun)

    def go_back(self, session: Mapping[str, Any], local: Mapping[str, Any]) -> None:
        """The same for a job that goes back in place, in the loop that is open."""
        loop, turns = self.place["loop"], self.walk.record
        self.stand_at(session, local)
        self.walk.stand_at(turns)  # it goes back in the loop that is open, so in the turn that is
        self._rank.turns = self.walk.passed
        if self.place["loop"] != loop:  # the state is of the moment at which this loop began
            self.place = {"loop": loop, "at": self._began[0]}
            self._say_what_it_is()
            self.local = dict(self._began[1])
        if self._feed is not None:
            self._feed.seek(self.place["at"], self.local.get("loader"))
        self._batches.forget()
        self._drawn = -1

    # ------------------------------------------------------------------ the generator

    def run(
        self,
        loader: Any,
        epochs: int | None,
        until: int | None,
        batches: int | None,
        left: Callable[[], bool],
        make: Callable[[int], Step],
        back: Callable[[], None],
    ) -> Iterator[Step]:
        """The next loop.

        Args:
            batches: of the loader, in one step.
            left: it ends before ``until``.
            make: makes a step of this number.
            back: the script is back from behind the block of a step.
        """
        return self._run(self.walk.next_loop(), loader, epochs, until, batches, left, make, back)

    def _run(
        self,
        loop: int,
        loader: Any,
        epochs: int | None,
        until: int | None,
        batches: int | None,
        left: Callable[[], bool],
        make: Callable[[int], Step],
        back: Callable[[], None],
    ) -> Iterator[Step]:
        saved_loop = self.place["loop"]
        if saved_loop > loop:
            if self.begun is not None:
                self.begun.close()
                self.begun = None
            if loop == 0 and self._first is not None:
                self._anew = counted_anew(self._rank.step, until, self._first)
            self.pass_over()
            return  # the checkpoint was written in a later loop of the script
        self._come_in()
        self._bound = self._end_of(loop, until)
        feed, self.begun = self.begun, None
        if feed is None and loader is not None:
            feed = grouped(self._adapter.feed(loader), batches)
        self._feed, self._loader = feed, (loader, batches)
        self._data = self._compare(feed, loop)
        self._proof.begin(loader)
        first = self.walk.epoch or 0
        self._drawn, self._epochs = -1, None if epochs is None else epochs * (first + 1)
        if feed is not None and saved_loop == loop:
            self._seek(feed)
        elif feed is not None and first:  # each epoch of the script has data in an order of its own
            feed.seek({"epoch": first * (epochs or 1), "batch": 0})
        if saved_loop < loop:
            self.place, self.local = {"loop": loop, "at": None if feed is None else feed.place()}, {}
        self._say_what_it_is()
        if feed is not None and feed.rewinds and self._tier.on:  # code that draws its own cannot go back
            self._began = (self.place["at"], {"loader": feed.local_state()})
            self._allow_rewind()
        self._adapter.remember(self._rank.step)  # what was done since the last loop belongs to this place
        end, begun_at = self._bound[1], self._rank.step
        self._begin_loop(unfinished=feed is not None or end is None or end < ENDLESS)
        if self.walk.inside and saved_loop < loop:
            self.renew()
        back()  # also from behind the block from which it has left the loop before this one
        try:
            yield from self._each(lambda: left() or self._is_over(end), make, back)
            nothing = saved_loop == loop and self._rank.step == begun_at and not left()
            if nothing and self._adapter.rank == 0:
                log.info("holdfast: no step is left to do in this loop: it was over at step %d", begun_at)
            self._end_loop()
            self._forget_loop()
            if self.walk.inside and left():
                raise SystemExit(0)  # what follows in this epoch comes when the job has done the rest of it
        except GeneratorExit:
            self._left_behind = self._given
            if self.walk.inside and not left():
                self._leave(certain=leaves(sys._getframe(1)))
            raise
        finally:
            self._out_of_loop()
            self._feed = None
            for one in (feed, *self._others.values()):
                if one is not None:
                    one.close()
            self._others = {}

    def finish(self) -> None:
        """No step follows. Who came in for a lost rank would come into a loop that this one has left before its end."""
        if self._rank.script.unfinished:
            self._rank.moved(ScriptEvent.STRAYED)

    def _leave(self, *, certain: bool) -> None:
        """The script has left the loop by ``break``, or an exception has: then it goes up, or the script catches it."""
        if certain or not (self._adapter.poisoned or self._rank.fenced):
            self.place["left"] = True
            self._tier.amend(self._rank.step)
            self._end_loop()
            if certain:
                self._forget_loop()

    def _allow_rewind(self) -> None:
        """Report that the open loop can go back to where it begins."""
        with self._rank.changed:
            self._rank.script.allow_rewind(self._rank.step)

    def _begin_loop(self, *, unfinished: bool) -> None:
        with self._rank.changed:
            self._rank.script.run_loop(unfinished=unfinished)

    def _forget_loop(self) -> None:
        """Report that the open loop is over for the whole job."""
        with self._rank.changed:
            self._rank.script.end_loop()

    def _out_of_loop(self) -> None:
        """Report that the script is out of the loop. After a loop that was left, there are no copies to put back."""
        left = self._rank.script.unfinished
        self._rank.moved(ScriptEvent.LOOP_LEFT if left else ScriptEvent.LOOP_OVER)

    def require_whole(self) -> None:
        """The script has come back to the session.

        Raises:
            StepError: it has left a loop behind a block that did not count, and the step is not done.
        """
        step, self._left_behind = self._left_behind, None
        if step is not None and step.entered and not step.committed:
            raise StepError(
                f"the script has left its loop behind step {step.number}, whose block did not count: the step would "
                "be missing",
                hint="a block runs again after a fault and for its check: `if step.committed and ...: break`",
            )

    @property
    def strays(self) -> bool:
        """The script has left the loop, and whoever comes in would come into it."""
        return self._rank.script.unfinished and not self.place.get("left", False)

    def fall(self) -> None:
        """The script's own exception goes up: it may have been what has left the loop."""
        if self._rank.script.unfinished:
            self.place["left"] = False

    def _is_over(self, end: int | None) -> bool:
        """The loop is at its end, or the script has left it in an epoch or phase that is not done yet."""
        return (end is not None and self._rank.step >= end) or self.place.get("left", False)

    def renew(self) -> None:
        """What is kept in memory of this step is of before this moment."""
        self._tier.renew(self._rank.step)

    def note_turns(self) -> None:
        """Into the place: which epochs and phases the job has done."""
        self.place["turns"] = self.walk.record

    def require_all(self) -> None:
        """The script ends in order. Raises: UsageError when the job has come further than this script."""
        unused = not self.walk.loops and self.place.get("over", False)
        if not unused and (missing := self.walk.missing(self.place["loop"])):
            raise UsageError(
                f"the script has ended at step {self._rank.step}, without {missing}: steps would be missing",
                hint=f"the session leaves out what is done: {IDIOM}, in the order of the start",
            )

    def _end_loop(self) -> None:
        """What the script does from now on it may do again, with the same state and random numbers."""
        self.place["over"] = True
        if self.walk.inside:
            self._adapter.between(self._rank.step, 0, again=True)
        self._adapter.remember(self._rank.step, whole=self.walk.inside)

    def pass_over(self) -> None:
        """A loop that the job has behind it: what the script does after it is in the state that was restored."""
        if not self._passed_over:
            self._passed_over = True
            self._adapter.begin(self._rank.step)
        self._rank.moved(ScriptEvent.LOOP_AHEAD)

    def _come_in(self) -> None:
        """The loop where the job is: what the script has done again after those before it is put back."""
        if self._passed_over:
            self._passed_over = False
            self._adapter.abort()
        self._rank.moved(ScriptEvent.LOOP_OPENED)

    def _say_what_it_is(self) -> None:
        """Into the place: data and bound of the open loop, and the bound of the first one."""
        if self.place["loop"] == 0:
            self._first = self._bound
        self.place.update(data=self._data, bound=self._bound, first=self._first, over=False)
        self.note_turns()

    def _end_of(self, loop: int, until: int | None) -> Bound:
        """Where this loop began and ends. Raises: UsageError when it ends elsewhere on another rank."""
        place, here = self.place, self._rank.step
        bound = (here, until)
        if place["loop"] == loop and "bound" in place:
            bound = bound_of(loop, here, until, place["bound"], self._before, anew=self._anew)
        compare_bounds(self._rank.client, self._adapter.rank, self._adapter.world_size, loop, bound[1])
        return bound

    def _compare(self, feed: Feed | None, loop: int) -> list[int | str] | None:
        """What the data of this loop is, as far as known. Raises: UsageError when another rank has other data."""
        now = None if feed is None else feed.identity()
        if now is None:
            return None
        compare_with_ranks(self._rank.client, self._adapter.rank, loop, now)
        if self.place["loop"] == loop:
            compare_with_checkpoint(self.place.get("data"), now)
        return [now.length, now.content]

    def _seek(self, feed: Feed) -> None:
        at = self.place["at"]
        if at is None:
            log.warning("holdfast: the checkpoint was written without a loader: this one begins at its start")
            return
        if not (self._proof.reread(self._rank.step, feed, self._load) and feed.place() == at):
            feed.seek(at, self.local.get("loader"))
        self._tell_share(at, feed.place())

    def _tell_share(self, then: Mapping[str, int], now: Mapping[str, int]) -> None:
        """Say when a step has another number of samples than before, and what would give it the old one."""
        if "share" not in then or "share" not in now:
            return
        before, here = then["share"] * self._parts_then, now["share"] * self._parts
        if before == here:
            return
        way = (
            f"accumulate {plural(before // here, 'batch')} per step"
            if before % here == 0
            else f"give the loader {before / here:g} times the batch size"
        )
        log.warning(
            "holdfast: a step of the checkpoint's job had %s, one of this job has %d: it goes on at the same "
            "sample, but learning rate and schedule were made for %d; to keep them, %s",
            plural(before, "sample"),
            here,
            before,
            way,
        )

    def _each(
        self, over: Callable[[], bool], make: Callable[[int], Step], back: Callable[[], None]
    ) -> Iterator[Step]:
        while True:
            if over() or not self._draw():
                if self._rank.leave_loop():
                    return
                continue  # a recovery came first: the job may have gone back into this loop
            if not self._rank.take_step():
                continue  # what stands before the block belongs to the generation, and the step, of the block
            step = make(self._rank.step)
            self.fill(step)
            # Also when it is tried again, by whomever.
            self._adapter.between(step.number, step.part, again=step.again)
            self._rank.moved(ScriptEvent.STEP_GIVEN, again=step.again)
            self._given = step
            yield step
            self._given = None
            self._part = self._part + 1 if step.shared else 0
            if not step.entered:
                raise StepError(
                    f"step {step.number} was not entered",
                    hint="for step in s.steps(...): with step as batch: ...",
                )
            if step.committed:
                back()

    def _draw(self) -> bool:
        """Have the batches of this step at hand, one for each rank whose work this one does; False at the end."""
        if self._drawn == self._rank.step:
            return True
        before = {} if self._feed is None else self._feed.place()
        batches = [None] if self._feed is None else self._load(self._feed)
        if batches and self._feed is not None:
            self._proof.drew(self._rank.step, batches, before)
        if batches:
            self._batches.put(batches)
            self._part, self._drawn = 0, self._rank.step
        return bool(batches)

    def _draw_again(self) -> None:
        """The batches of this step, once more: what the block was given is no longer what it was. Raises: StepError."""
        feed = self._feed
        if feed is None:
            return
        feed.seek(self.place["at"], self.local.get("loader"))
        batches = self._load(feed)
        if len(batches) != len(self._batches):
            raise StepError(
                f"step {self._rank.step}: the loader does not draw the same batch again",
                hint="leave the batch as it is in the block: labels = batch['labels'], x = x * 2 in place of x.mul_(2)",
            )
        self._proof.drew(self._rank.step, batches, self.place["at"])
        self._batches.again(batches)

    def batch_of(self, copy: int) -> Any:
        """What another copy of the model draws for this step. Raises: LookupError: that is not known here."""
        if self._feed is None:
            return None  # the block draws it
        if copy not in self._others:
            self._others[copy] = self._feed_of(copy)
        feed = self._others[copy]
        if feed is None:
            raise LookupError(copy)
        feed.seek(self.place["at"])
        try:
            return feed.draw(self._epochs)
        except StopIteration as end:
            raise LookupError(copy) from end

    def _feed_of(self, copy: int) -> Feed | None:
        others = self._adapter.others if isinstance(self._adapter, StandsForOthers) else None
        feed = None if others is None else others.feed(self._loader[0], copy)
        return None if feed is None else grouped(feed, self._loader[1])

    def _load(self, feed: Feed) -> list[Any]:
        batches: list[Any] = []
        self._rank.enter(Phase.LOADING)
        try:
            while len(batches) < self._parts and not (batches and feed.last_in_epoch):
                batches.append(feed.draw(self._epochs))
        except StopIteration:
            pass  # the end of the last epoch: its last step has fewer parts, or there is no step
        finally:
            if not self._rank.fenced:
                self._rank.enter(Phase.READY)
        return batches

    def fill(self, step: Step) -> None:
        """Make ``step`` the one where the job is; also one that was about to begin when the job went back."""
        self._draw()
        step.number, step.part = self._rank.step, self._part
        step.parts = len(self._batches)
        if self._batches.spoiled(self._part):
            self._draw_again()
        step.batch = self._batches.give(self._part)
        step.repeats = not self._batches.opaque(self._part)
        step.batches = len(step.batch) if isinstance(self._feed, AccumulatingFeed) else None
        if self._feed is not None:
            step.epoch, step.last_in_epoch = self._feed.epoch, self._feed.last_in_epoch
        step.again = step.number <= self._tried
        self._tried = max(self._tried, step.number)

    # ------------------------------------------------------------------ in a step, and after it

    def entered(self, step: int) -> bytes | None:
        """The block of ``step`` has begun: what only this rank knows, for its status page."""
        if self.local.get("begun") == step:
            self.own = copy.deepcopy(self.local.get("own"))  # the block that does not count has changed it
            return None
        self.local["begun"] = step
        if self._proof.record is not None:
            self.local["drawn"] = self._proof.record
        if self.own is not None:
            self.local["own"] = copy.deepcopy(self.own)
        return self._payload(self.local)

    def foresee(self) -> bytes | None:
        """This rank is about to vote: what it will know after the step, for its status page. Lost in the update, it
        cannot tell any more where its loader was."""
        self._after = None if self._feed is None else self._feed.local_state()
        local = {
            key: value for key, value in (("own", self.own), ("loader", self._after)) if value is not None
        }
        return self._payload(local) if local else None

    def note(self) -> bytes | None:
        """The place after this step; what only this rank knows of it, for its status page."""
        self.local = {} if self.own is None else {"own": copy.deepcopy(self.own)}
        if self._feed is not None:
            self.place["at"] = self._feed.place()
            if self._after is not None:
                self.local["loader"] = self._after
            if self._proof.record is not None:
                self.local["drawn"] = self._proof.record
        return self._payload(self.local) if self.local else None

    def digests_of(self, step: int) -> list[int]:
        """Of the batches that this rank has drawn for ``step``; empty: not known."""
        record = self._proof.record
        if record is None or record["step"] != step:
            return []
        return cast("list[int]", record["digests"])

    def _payload(self, local: Mapping[str, Plain]) -> bytes | None:
        """For the page; None when it has this, or cannot have it."""
        if self._rank.client is None or self._local_too_large:
            return None
        payload = encode_values(local, "locals")
        if payload == self._told:
            return None
        self._told = payload
        if len(payload) > LOCAL_SIZE_BYTES_MAX:
            self._local_too_large = True
            log.warning(
                "holdfast: the data loader's state takes %d bytes, the status page holds %d: should this rank be lost, "
                "its replacement reads the batches of that epoch again",
                len(payload),
                LOCAL_SIZE_BYTES_MAX,
            )
            return None
        return payload
