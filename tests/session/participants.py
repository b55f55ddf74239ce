"""A rank's side of the step protocol without a process beside it: the connection and the groups are recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.core.ids import Generation, MemberId
from holdfast.core.protocol.messages import Fence, Message, ResumeInPlace, Settle
from holdfast.core.protocol.status_page import Phase
from holdfast.errors import GroupError
from holdfast.session.steps.participant import StepParticipant


def generation(number: int) -> Generation:
    """Return a generation of the first controller."""
    return Generation(1, number)


class Page(dict[int, int]):
    """The words of a status page."""

    def __missing__(self, key: int) -> int:
        return 0

    @property
    def flight(self) -> Page:
        """The record of collectives, which is at rest."""
        return self

    def rests(self) -> bool:
        """Return True: no collective is open."""
        return True

    def enter(self, phase: Phase, step: int) -> None:
        """Show a phase, which no test reads."""

    def place(self, step: int, phase: Phase) -> None:
        """Show a phase, which no test reads."""

    def write_local(self, step: int, payload: bytes) -> None:
        """Show values, which no test reads."""


class Connection:
    """The connection of a rank to its agent. It keeps the messages, and runs tasks when the test says so."""

    def __init__(self, *, joining: bool = False) -> None:
        self.generation, self.member_id, self.rank = generation(1), MemberId(1), 0
        self.joining, self.stand_in = joining, None
        self.page = Page()
        self.sent: list[Message] = []
        self.tasks: list[Callable[[], None]] = []
        self.hello: Callable[[], object] = tuple

    def send(self, message: Message) -> None:
        """Keep a message."""
        self.sent.append(message)

    def on(self, kind: type[Message], handler: Callable[..., None]) -> None:
        """Take a handler: the test calls the rank itself."""

    def on_orphaned(self, handler: Callable[[], None]) -> None:
        """Take a handler: the agent of a test is never lost."""

    def run_task(self, task: Callable[[], None]) -> None:
        """Keep a task."""
        self.tasks.append(task)

    def resumed(self, resumed_in: Generation) -> None:
        """Go to a generation."""

    def moved(self, size_bytes: int) -> None:
        """Count bytes, which no test reads."""

    def of(self, kind: type[Message]) -> list[Any]:
        """Return the messages of one kind."""
        return [message for message in self.sent if isinstance(message, kind)]


class Groups:
    """The groups of a framework. ``rebuilt``: the generations in which they were built; ``during`` runs then."""

    rank, world_size = 0, 2

    def __init__(self) -> None:
        self.rebuilt: list[Generation] = []
        self.during: Callable[[Generation], None] = lambda in_generation: None
        self.poisoned = False

    def poison(self, reason: str) -> None:
        """Break every collective."""
        self.poisoned = True

    def reconfigure(self, in_generation: Generation) -> None:
        """Build the groups of a generation. Raises: GroupError, if they were broken meanwhile."""
        self.rebuilt.append(in_generation)
        self.poisoned = False
        self.during(in_generation)
        if self.poisoned:
            raise GroupError("broken while they were built")


def participant(*, joining: bool = False) -> tuple[StepParticipant, Connection, Groups]:
    """Return a rank, its connection and its groups."""
    connection, groups = Connection(joining=joining), Groups()
    client: Any = connection
    adapter: Any = groups
    return StepParticipant(adapter, client), connection, groups


def fence(number: int) -> Fence:
    """Return a fence of a generation."""
    return Fence(member_id=MemberId(1), generation=generation(number), reason="a rank is lost")


def settle(number: int, step: int, **how: Any) -> Settle:
    """Return a decision of a generation."""
    return Settle(member_id=MemberId(1), generation=generation(number), step=step, **how)


def resume(number: int, step: int) -> ResumeInPlace:
    """Return the order to continue in a generation."""
    return ResumeInPlace(member_id=MemberId(1), generation=generation(number), step=step)
