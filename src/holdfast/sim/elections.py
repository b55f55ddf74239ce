"""Bounded exhaustive search over two elections: every order of votes, lost messages, crashes, restarts and lost disks.

Theory. The state machines are the real ones. The network is the set of messages in flight; a message that is never
taken out of the set is lost. An agent may crash after any prefix of the commands of an event. A restarted agent has
only the state that the executed commands have persisted, or none if its host was installed again. An answer to a trial
vote (raft pre-vote) binds no voter, so every answer is possible at any time. A campaign therefore begins with the real
vote here. The search takes every enabled action from each state and skips states that it has seen.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.election import FIRST_TERM, Election, ElectionConfig, HardState
from holdfast.core.ids import NodeId
from holdfast.core.protocol.messages import (
    Command,
    Message,
    Send,
    Tick,
)
from holdfast.core.protocol.peer_messages import (
    ControllerUp,
    LeaderLost,
    PersistHardState,
    RequestVote,
    StartController,
    VoteReply,
    VoterSet,
)
from holdfast.sim.invariants import Violation

STATES_MAX = 2_000_000


class Node(NamedTuple):
    """One agent: its persistent state, and the state machine of its election (None after a crash)."""

    kept: HardState
    machine: Election | None

    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for equal states of the agent."""
        m = self.machine
        return (self.kept, None) if m is None else (self.kept, m.role, m.lead, m._granted)


class ElectionState(NamedTuple):
    """One state of the whole system.

    Attributes:
        nodes: all agents.
        network: the messages in flight, with their receivers.
        leaders: every (term, leader) so far.
        granted: every granted vote so far: (voter, term, candidate).
        crashes: number of crashes that may still happen.
        reinstalls: number of agents that may still lose their disk.
    """

    nodes: tuple[Node, ...]
    network: frozenset[tuple[NodeId, Message]]
    leaders: frozenset[tuple[int, NodeId]]
    granted: frozenset[tuple[NodeId, int, NodeId]]
    crashes: int
    reinstalls: int

    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for equal states of the system."""
        return (tuple(n.key() for n in self.nodes), *self[1:])


class ElectionResult(NamedTuple):
    """The result of a search: the number of states, and the most terms with a leader in one history (``elections``)."""

    states: int
    elections: int


class ElectionSearch:
    """A search through all histories of a group of voters.

    Args:
        agents: number of voters.
        campaigns: for each agent, the highest term up to which it campaigns. Further agents do not campaign.
        crashes: largest number of crashes.
        reinstalls: largest number of agents that lose their disk.
        announced: True if a leader's controller starts, so that the leader announces itself.
        machine: the election machine to test.

    Attributes:
        electorates: the electorate that each agent has stored at the start. All agents are voters by default.
    """

    def __init__(
        self,
        agents: int,
        campaigns: tuple[int, ...],
        crashes: int,
        *,
        announced: bool,
        machine: type[Election] = Election,
        reinstalls: int = 0,
    ) -> None:
        self.names = tuple(NodeId(f"n{i}") for i in range(agents))
        self.campaigns = campaigns
        self.crashes = crashes
        self.reinstalls = reinstalls
        self.electorates = (VoterSet(0, 1, self.names),) * agents
        self.announced = announced
        self.machine = machine

    def run(self) -> ElectionResult:
        """Visit every reachable state.

        Raises:
            Violation: two leaders in a term, two grants of a voter in a term, or a state machine's own check.
        """
        # Blank votes count in the first term, in which only the founder campaigns. Here several agents campaign.
        term = FIRST_TERM if self.reinstalls else 0
        kept = [HardState(term=term, electorate=known, committed=True) for known in self.electorates]
        nodes = tuple(Node(known, self._make(i, known)) for i, known in enumerate(kept))
        first = ElectionState(nodes, frozenset(), frozenset(), frozenset(), self.crashes, self.reinstalls)
        seen = {first.key()}
        stack = [first]
        most = 0
        while stack:
            state = stack.pop()
            most = max(most, len({term for term, _ in state.leaders}))
            for after in self._actions(state):
                key = after.key()
                if key not in seen:
                    seen.add(key)
                    stack.append(after)
            if len(seen) > STATES_MAX:
                raise Violation("the_search_ends", f"more than {STATES_MAX} states")
        return ElectionResult(len(seen), most)

    def _make(self, index: int, kept: HardState) -> Election:
        machine = self.machine(ElectionConfig(node_id=self.names[index]), kept)
        machine.start(0.0)
        return machine

    def _actions(self, state: ElectionState) -> list[ElectionState]:
        found: list[ElectionState] = []
        for index, node in enumerate(state.nodes):
            if node.machine is None:
                back = Node(node.kept, self._make(index, node.kept))
                found.append(self._with(state, index, back))
                continue
            if state.reinstalls:
                again = Node(HardState(), self._make(index, HardState()))
                found.append(self._with(state, index, again)._replace(reinstalls=state.reinstalls - 1))
            if (
                index < len(self.campaigns)
                and node.kept.term < self.campaigns[index]
                and not node.machine.lead
            ):
                found += self._feed(state, index, [Tick(name="campaign"), *self._encouraged(index, node)])
            if self.announced and node.machine.role == "leader" and node.machine.lead is None:
                found += self._feed(state, index, [ControllerUp(term=node.kept.term, host="", port=1)])
            if node.machine.lead is not None:
                found += self._feed(state, index, [LeaderLost()])
        for target, message in state.network:
            without = state._replace(network=state.network - {(target, message)})
            index = self.names.index(target)
            if without.nodes[index].machine is not None:
                found += self._feed(without, index, [message])
        return found

    def _encouraged(self, index: int, node: Node) -> list[Message]:
        term = node.kept.term + 1
        others = [name for name in self.names if name != self.names[index]]
        return [VoteReply(voter=other, term=term, trial=True, granted=True) for other in others]

    def _feed(self, state: ElectionState, index: int, events: list[Message]) -> list[ElectionState]:
        """Return the state after an agent handled ``events``, and one state for each point at which it may crash."""
        before = state.nodes[index].machine
        assert before is not None
        machine = before.copy()
        commands: list[Command] = []
        for event in events:
            commands += machine.handle(0.0, event)
        machine.check()
        found = [self._execute(state, index, machine, commands)]
        if state.crashes:
            for cut in range(len(commands) + 1):
                after = self._execute(state, index, None, commands[:cut])
                found.append(after._replace(crashes=state.crashes - 1))
        return found

    def _execute(
        self, state: ElectionState, index: int, machine: Election | None, commands: list[Command]
    ) -> ElectionState:
        me = self.names[index]
        kept = state.nodes[index].kept
        network, leaders, granted = set(state.network), set(state.leaders), set(state.granted)
        for command in commands:
            if isinstance(command, PersistHardState):
                kept = HardState(
                    term=command.term,
                    voted_for=command.voted_for,
                    electorate=command.electorate,
                    committed=command.committed,
                )
            elif isinstance(command, StartController):
                leaders.add((command.term, me))
            elif isinstance(command, Send):
                message = command.message
                if (
                    isinstance(message, VoteReply)
                    and message.granted
                    and not (message.trial or message.blank)
                ):
                    granted.add((me, message.term, NodeId(command.to[5:])))
                if not (isinstance(message, RequestVote | VoteReply) and message.trial):
                    names = self.names if command.to == "node:*" else (NodeId(command.to[5:]),)
                    network |= {(name, message) for name in names if name != me}
        if len({term for term, _ in leaders}) < len(leaders):
            raise Violation("one_leader_per_term", f"{sorted(leaders)}")
        if len({(voter, term) for voter, term, _ in granted}) < len(granted):
            raise Violation("one_vote_per_term", f"{sorted(granted)}")
        after = state._replace(
            network=frozenset(network), leaders=frozenset(leaders), granted=frozenset(granted)
        )
        return self._with(after, index, Node(kept, machine))

    @staticmethod
    def _with(state: ElectionState, index: int, node: Node) -> ElectionState:
        return state._replace(nodes=(*state.nodes[:index], node, *state.nodes[index + 1 :]))
