"""The jobs that agents know of while they meet."""

from __future__ import annotations

import random
from collections import deque
from itertools import permutations

from holdfast.core.ids import NodeId
from holdfast.core.meeting import Meeting

A, B, C = (NodeId(f"node{i}") for i in range(3))
GATHER_S = 2.0


def meeting(job: str = "", nodes_min: int = 2, nodes_max: int = 3) -> Meeting:
    return Meeting(job, nodes_min, nodes_max, GATHER_S)


def test_a_job_is_founded_at_once_when_all_are_there_and_later_when_enough_are() -> None:
    one = meeting()
    assert not one.may_found(0.0, 1) and not one.may_found(5.0, 2) and not one.may_found(6.9, 2)
    assert one.may_found(7.1, 2)
    assert meeting().may_found(0.0, 3)


def test_the_time_to_gather_begins_again_when_an_agent_has_gone() -> None:
    one = meeting()
    assert not one.may_found(0.0, 2) and not one.may_found(1.0, 1) and not one.may_found(2.5, 2)
    assert one.may_found(4.6, 2)


def test_no_job_is_founded_beside_another_one() -> None:
    one = meeting()
    one.told(B, "job1", "")
    assert one.near == one.elsewhere == "job1" and not one.may_found(0.0, 3) and not one.may_found(60.0, 3)
    other = meeting()
    other.told(A, "", one.near)
    assert (other.near, other.elsewhere) == ("", "job1") and not other.may_found(60.0, 3)


def test_the_next_job_is_founded_some_time_after_the_last_one_has_gone() -> None:
    one = meeting()
    assert one.told(B, "job1", "") and one.gone(B)
    assert not one.may_found(10.0, 3), "the connection may have been lost for a moment"
    assert one.may_found(12.1, 3)


def test_only_the_first_hand_is_told_on() -> None:
    one = meeting()
    assert not one.told(B, "", "job1") and one.near == ""
    assert one.told(C, "job1", "") and one.near == "job1"
    assert not one.told(C, "job1", ""), "nothing new"


class Agents:
    """Agents that are all connected. Each line keeps its order, different lines do not."""

    def __init__(self, names: list[NodeId], belong: set[NodeId], seed: int) -> None:
        self.of = {name: meeting("job1" if name in belong else "", 3) for name in names}
        self.lines: dict[tuple[NodeId, NodeId], deque[tuple[str, str]]] = {
            pair: deque() for pair in permutations(names, 2)
        }
        self.random = random.Random(seed)
        for name in names:
            self.publish(name)

    def publish(self, name: NodeId) -> None:
        for (source, _), line in self.lines.items():
            if source == name:
                line.append((self.of[name].job, self.of[name].near))

    def deliver(self, count: int) -> None:
        """Deliver at most ``count`` messages, in a random order of the lines."""
        for _ in range(count):
            waiting = [pair for pair, line in self.lines.items() if line]
            if not waiting:
                return
            source, target = self.random.choice(waiting)
            if self.of[target].told(source, *self.lines[source, target].popleft()):
                self.publish(target)

    def end(self, name: NodeId) -> None:
        """End one agent; the others notice the end after what it has sent, at different times."""
        del self.of[name]
        for source, target in list(self.lines):
            if name in (source, target):
                del self.lines[source, target]
        for other in self.random.sample(sorted(self.of), len(self.of)):
            self.deliver(self.random.randrange(4))
            if self.of[other].gone(name):
                self.publish(other)


def test_a_name_is_forgotten_everywhere_once_no_agent_belongs_to_the_job() -> None:
    """Regression: two agents sent each other the name of a job that had ended, for ever."""
    names = [NodeId(f"node{i}") for i in range(5)]
    for seed in range(300):
        agents = Agents(names, belong=set(names[3:]), seed=seed)
        agents.deliver(agents.random.randrange(40))
        for name in names[3:]:
            agents.end(name)
        agents.deliver(1000)
        assert not any(one.elsewhere for one in agents.of.values())
        first = agents.of[names[0]]
        assert not first.may_found(0.0, 3) or not first._was_near
        assert first.may_found(GATHER_S + 0.1, 3)
