"""Bounded exhaustive search over two elections: every order of votes, lost messages, crashes, restarts and lost disks.

Theory. The state machines of the election are the real ones. The search takes every possible action from each state,
and skips states that it has already visited.

1. The network is the set of messages in flight. A message that no action delivers is lost.
2. An agent may crash after any prefix of the commands of an event. A restarted agent has only the state that the
   executed commands have persisted. If its host was installed again, the agent has no state.
3. A trial round (raft pre-vote) is not simulated: its answers bind no voter, so a candidate may win it at any time.
   Every campaign begins with the vote after the trial round.
4. With a witness, an agent may lose all connections at any time, and a leader may receive a list of connected nodes
   with any one node missing. With a witness, messages of older terms are also lost, which bounds the search.
5. All messages to a host are lost when the host is installed again. Such a host never receives the electorate of a
   deposed leader, because the elections are not safe in that case (docs/design/0038-simulated-hosts.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from holdfast.core.election import FIRST_TERM, Election, ElectionConfig, HardState
from holdfast.core.ids import NodeId
from holdfast.core.protocol.messages import (
    Command,
    Message,
    Rolled,
    Send,
    Tick,
)
from holdfast.core.protocol.peer_messages import (
    Claim,
    ConfigChange,
    ControllerUp,
    LeaderLost,
    PersistHardState,
    RequestVote,
    StartController,
    VoteReply,
    VoterSet,
    WitnessReply,
)
from holdfast.sim.invariants import Violation

STATES_MAX = 2_000_000


class Node(NamedTuple):
    """One agent: the state on its disk (``kept``), and the state machine of its election (None after a crash)."""

    kept: HardState
    machine: Election | None

    def key(self) -> tuple[object, ...]:
        """Return a hashable key that is equal for equal states of the agent."""
        m = self.machine
        if m is None:
            return (self.kept, None)
        acks = None if self.kept.committed else m._acks
        return (self.kept, m.role, m.lead, m._granted, m._doubted, m._claimed, acks, m._up)


class ElectionState(NamedTuple):
    """One state of all agents, the network and the witness, with the history that the checks need.

    Attributes:
        nodes: all agents.
        network: the messages in flight: (receiver, message).
        leaders: every leader so far: (term, leader).
        granted: every granted vote so far: (voter, term, candidate).
        crashes: number of crashes that may still happen.
        reinstalls: number of agents that may still lose their disk.
        claims: the electorates that the witness has recorded: (number of the electorate, voters).
        committed: every committed electorate so far, without its term: (number of the electorate, voters).
    """

    nodes: tuple[Node, ...]
    network: frozenset[tuple[NodeId, Message]]
    leaders: frozenset[tuple[int, NodeId]]
    granted: frozenset[tuple[NodeId, int, NodeId]]
    crashes: int
    reinstalls: int
    claims: frozenset[tuple[int, tuple[NodeId, ...]]]
    committed: frozenset[tuple[int, tuple[NodeId, ...]]]

    def key(self) -> tuple[object, ...]:
        """Return a hashable key that is equal for equal states of the whole system."""
        return (tuple(n.key() for n in self.nodes), *self[1:])


class ElectionResult(NamedTuple):
    """The result of a search.

    Attributes:
        states: number of visited states.
        elections: the largest number of terms with a leader in one order of events.
    """

    states: int
    elections: int


class ElectionSearch:
    """An exhaustive search through all orders of events of a group of voters.

    Args:
        agents: number of agents; each is a voter.
        campaigns: for each of the first agents, the highest term for which it campaigns. The remaining agents do not
            campaign.
        crashes: largest number of crashes in one order of events.
        reinstalls: largest number of agents that lose their disk in one order of events.
        announced: True if the controller of a leader starts, and the leader then announces itself to the other agents;
            False if no controller starts.
        machine: class of the election's state machine, for example with a planted error.

    Attributes:
        electorates: the electorate that each agent has stored at the start. By default it contains all agents. A
            newer electorate counts as committed if a majority of its voters have stored it.
        changes: with a witness, the highest number of an electorate that a leader creates (each new electorate has the
            next number); 0 if there is no witness.
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
        self.changes = 0
        self.announced = announced
        self.machine = machine

    def run(self) -> ElectionResult:
        """Visit every reachable state.

        Raises:
            Violation: a term has two leaders; a voter grants two votes in one term; with a witness, two different
                electorates with the same number are committed; or a check inside a state machine fails.
        """
        # Blank votes count in the first term, in which only the founder of the job campaigns. Here several agents
        # campaign, so the search begins after that term.
        term = FIRST_TERM if self.reinstalls else 0
        known = self.electorates
        held = [each == min(known) or known.count(each) >= each.quorum for each in known]
        kept = [HardState(term=term, electorate=each, committed=held[i]) for i, each in enumerate(known)]
        nodes = tuple(Node(each, None) for each in kept)
        claims = frozenset((each.number, each.voters) for each in self.electorates)
        nothing = frozenset[Any]()
        first = ElectionState(
            nodes, nothing, nothing, nothing, self.crashes, self.reinstalls, claims, nothing
        )
        for index in range(len(nodes)):
            first = self._booted(first, index)
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

    def _booted(self, state: ElectionState, index: int) -> ElectionState:
        """Return the state of the system after agent ``index`` was started with the data on its disk."""
        machine = self.machine(ElectionConfig(node_id=self.names[index]), state.nodes[index].kept)
        return self._execute(state, index, machine, machine.start(0.0))

    def _actions(self, state: ElectionState) -> list[ElectionState]:
        found: list[ElectionState] = []
        for index, node in enumerate(state.nodes):
            if node.machine is None:
                found.append(self._booted(state, index))
                continue
            if state.reinstalls:
                network = frozenset((to, message) for to, message in state.network if to != self.names[index])
                again = self._with(state, index, Node(HardState(), None))
                again = again._replace(reinstalls=state.reinstalls - 1, network=network)
                found.append(self._booted(again, index))
            campaigns = index < len(self.campaigns) and node.kept.term < self.campaigns[index]
            if campaigns and not node.machine.lead:
                found += self._feed(state, index, [Tick(name="campaign"), *self._encouraged(index, node)])
            if node.machine.role == "candidate" and campaigns and not self.announced:
                found += self._feed(state, index, [Tick(name="campaign")])  # votes of this term may be late
            if self.announced and node.machine.role == "leader" and node.machine.lead is None:
                found += self._feed(state, index, [ControllerUp(term=node.kept.term, host="", port=1)])
            if node.machine.lead is not None and (campaigns or not self.changes):
                found += self._feed(state, index, [LeaderLost()])
            if self.changes and campaigns and node.machine.lead is None:
                found += self._feed(state, index, [Tick(name="alone")])
            if node.machine.role == "leader" and node.kept.electorate is not None:
                found += self._changed(state, index, node.kept.electorate, node.machine)
        for target, message in state.network:
            without = state._replace(network=state.network - {(target, message)})
            index = self.names.index(target)
            if without.nodes[index].machine is not None and not self._is_outdated(state, index, message):
                found += self._feed(without, index, [message])
        return found

    def _is_outdated(self, state: ElectionState, index: int, message: Message) -> bool:
        """Return True if ``message`` has the electorate of a deposed leader, and its receiver was installed again."""
        if not isinstance(message, ConfigChange) or state.nodes[index].kept.electorate is not None:
            return False
        terms = [node.kept.term for node in state.nodes] + [term for term, _ in state.leaders]
        return message.term < max(terms)

    def _changed(
        self, state: ElectionState, index: int, electorate: VoterSet, machine: Election
    ) -> list[ElectionState]:
        """Return the states after a leader received a list of connected nodes, one state for each list.

        The lists are: all nodes, and all nodes without one other node.
        """
        found: list[ElectionState] = []
        for gone in (None, *self.names) if electorate.number < self.changes else ():
            up = tuple(name for name in self.names if name != gone)
            if self.names[index] in up and frozenset(up) != machine._up:
                found += self._feed(state, index, [Rolled(up=up)])
        return found

    def _encouraged(self, index: int, node: Node) -> list[Message]:
        term = node.kept.term + 1
        others = [name for name in self.names if name != self.names[index]]
        return [VoteReply(voter=other, term=term, trial=True, granted=True) for other in others]

    def _feed(self, state: ElectionState, index: int, events: list[Message]) -> list[ElectionState]:
        """Return the state after agent ``index`` handled ``events``, and one state per point at which it may crash."""
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
        claims, committed = dict(state.claims), set(state.committed)
        for command in commands:
            if isinstance(command, PersistHardState):
                kept = HardState(
                    term=command.term,
                    voted_for=command.voted_for,
                    electorate=command.electorate,
                    committed=command.committed,
                )
                if self.changes and kept.committed and kept.electorate is not None:
                    committed.add((kept.electorate.number, kept.electorate.voters))
            elif isinstance(command, StartController):
                leaders.add((command.term, me))
            elif isinstance(command, Claim):
                voters = claims.setdefault(command.number, command.voters)
                network.add((me, WitnessReply(number=command.number, voters=voters)))
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
        if len(dict(committed)) < len(committed):
            raise Violation("one_electorate_per_number", f"{sorted(committed)}")
        if self.changes:
            terms = {name: node.kept.term for name, node in zip(self.names, state.nodes, strict=True)}
            terms[me] = kept.term
            network = {(to, each) for to, each in network if getattr(each, "term", terms[to]) >= terms[to]}
        after = state._replace(
            network=frozenset(network),
            leaders=frozenset(leaders),
            granted=frozenset(granted),
            claims=frozenset(claims.items()),
            committed=frozenset(committed),
        )
        return self._with(after, index, Node(kept, machine))

    @staticmethod
    def _with(state: ElectionState, index: int, node: Node) -> ElectionState:
        return state._replace(nodes=(*state.nodes[:index], node, *state.nodes[index + 1 :]))
