"""The election of the agent that runs the controller: by majority of the agents, once per term, as in raft.

Theory. A leader of term t got the votes of a majority of the voters, and a voter votes once per term. Two leaders of
one term would need a common voter that voted twice. No clock is trusted. A deposed leader may not know yet that it is
deposed, but it cannot decide anything. A decision needs the report or the confirmed death of every rank, and the loss
of a node counts only while a majority of the agents is connected. A *trial* vote, which changes no term, comes before
the real vote. So an agent with a broken cable does not depose a leader that all other agents can reach.

A leader decides from the event log of its node. A host that lost power, or was installed again, may come back with an
older log or none. A controller on that host would treat the job as a new one, and end the processes that hold the state
of the job. So a voter refuses a candidate whose log ends before the log of the voter. ``LogHeld`` comes before each
request for a vote that the voter may grant, because lines are written while no election takes place.

A host that was installed again has also lost its votes. Such a voter knows no electorate, and reports that with its
vote: the vote is *blank*, and does not count. Two majorities share a voter, and this voter has to remember its votes.
In the first term only the founder (the agent on which the job began) asks for votes, so a blank vote also counts there.
A new leader sends the electorate to all agents. An agent that receives it cannot vote again in the leader's term: the
leader already has the votes of a majority. The price: no leader is elected if no majority remembers its votes. The
remaining agents then save a checkpoint and end (docs/design/0038-simulated-hosts.md).

The electorate (the set of voters) changes by one voter at a time. Each agent uses a change from the moment it has
stored the change. A change is committed when a majority of the new voters have stored it, and only then may the next
change begin. A change from one voter to two is committed when the old voter has stored it, because the old voter is in
each majority before and after. A new leader first issues the electorate again in its own term. A voter refuses a
candidate with an older electorate. Any two successive majorities therefore share a voter.

If one of two voters is lost, the remaining voter has no majority. With a *witness* (an object store where a name can
be created only once) the voter that first creates the name of the next change continues alone. The other voter finds
the name taken and gives up. If the other voter is connected but has forgotten its votes, the witness is asked at
once.

Invariants:
1. The state on which an answer or act depends is on disk first: ``PersistHardState`` precedes the ``Send``.
2. Within a term, ``voted_for`` of a voter changes only from empty to the name of a candidate.
3. At most one agent leads in each term.
4. The terms and the electorates that an agent stores never become older.
5. At the time of a vote, the log of the voter is not newer than the log of the leader that it votes for.
6. A leader of any term but the first has the votes of a majority that remembers its votes.
"""

from __future__ import annotations

import copy
from typing import Literal, NamedTuple

import msgspec

from holdfast.core.ids import NodeId
from holdfast.core.protocol.messages import (
    CancelTimer,
    Command,
    Message,
    Rolled,
    Send,
    SetTimer,
    Tick,
)
from holdfast.core.protocol.peer_messages import (
    Claim,
    ConfigChange,
    ConfigChangeAck,
    ControllerUp,
    Follow,
    Founded,
    GiveUp,
    Lead,
    LeaderLost,
    LogHeld,
    PeerHere,
    PersistHardState,
    RequestVote,
    StartController,
    StepDown,
    VoteReply,
    VoterSet,
    WitnessReply,
)

FIRST_TERM = 1
"""The term of the first election of a job, in which only the founder asks for votes."""

Role = Literal["follower", "trying", "candidate", "leader", "alone"]


class Votes(NamedTuple):
    """The voters that have granted their vote to this agent in ``term``. Term 0 means that no votes were requested."""

    term: int = 0
    voters: frozenset[NodeId] = frozenset()


class Asked(NamedTuple):
    """The number of the last change of the electorate that this agent has proposed to the witness.

    ``is_last``: no time is left for another proposal.
    """

    number: int = 0
    is_last: bool = False


class HardState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a voter that is kept on disk, for successors of its agent.

    The defaults are the state of an agent that has never voted.
    """

    term: int = 0
    voted_for: str = ""
    electorate: VoterSet | None = None
    committed: bool = False


class ElectionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The name of this agent and the time limits of its elections, in seconds."""

    node_id: NodeId
    stagger_s: float = 0.15  # voters campaign one after the other, so that votes do not split
    retry_s: float = 1.0
    starting_s: float = (
        3.0  # wait of a voter for the elected controller; its agent asks again each ``retry_s``
    )
    starting_s_max: float = 60.0
    doubt_s: float = 4.0  # longer than a connection to a controller may take
    alone_s: float = 8.0  # time without a leader after which the witness is asked, or the agent gives up


class Election:
    """The state machine of one agent's part in elections. Messages to other agents are ``Send(to="node:<id>")``."""

    def __init__(self, config: ElectionConfig, kept: HardState) -> None:
        self.config = config
        self.me = config.node_id
        self.kept = kept
        self.role: Role = "follower"
        self.lead: Lead | None = None
        self._doubted: Lead | None = None  # this agent has lost its connection to that controller
        self._granted = Votes()
        self._promised: frozenset[NodeId] = frozenset()  # trial votes for the next term
        self._acks: frozenset[NodeId] = frozenset()
        self._up: frozenset[NodeId] = frozenset()
        self._claimed = Asked()
        self._waits = False  # for the start of the controller of the elected agent
        self._starting_s = 0.0
        self._log = (0, 0)  # (term, number) of the newest record in the event log of this node
        self._out: list[Command] = []

    def start(self, now: float) -> list[Command]:
        """Search for a leader if this agent was restarted. In a new job, wait for the first voters or a leader."""
        if self.kept.electorate is not None:
            self._search(was_leader=False)
        return self._take()

    def handle(self, now: float, event: Message) -> list[Command]:
        """Handle one event. Return the commands that follow from it."""
        if self.role != "alone":
            self._handle(event)
        elif isinstance(event, LeaderLost):
            self._give_up("the controller that decides for this side alone is gone")
        return self._take()

    def _handle(self, event: Message) -> None:
        match event:
            case Founded():
                if self.kept.electorate is None:
                    founded = VoterSet(0, 1, event.voters, event.witness)
                    self._keep(electorate=founded, committed=True)
                    self._campaign()
            case LogHeld():
                self._log = (event.term, event.number)
            case LeaderLost():
                self._search(was_leader=self.role == "leader")
            case Lead():
                self._hear_of(event)
            case ControllerUp():
                self._controller_up(event)
            case PeerHere():
                self._greet(event.node_id)
            case RequestVote():
                self._asked(event)
            case VoteReply():
                self._answered(event)
            case Rolled():
                self._up = frozenset(event.up)
                self._amend()
            case ConfigChange():
                self._amended(event)
            case ConfigChangeAck():
                self._acknowledged(event)
            case WitnessReply():
                self._witnessed(event)
            case Tick():
                self._tick(event.name)
            case _:
                return

    def check(self) -> None:
        """Raise AssertionError if a candidate or leader lacks its own vote, is not a voter or leads in a wrong term."""
        electorate = self.kept.electorate
        if self.role in ("candidate", "leader"):
            assert self.kept.voted_for == self.me, f"{self.role} without its own vote"
            assert electorate is not None and self.me in electorate.voters, f"{self.role} without a seat"
        assert self.lead is None or self.lead.term == self.kept.term or self.role != "leader"

    def snapshot(self) -> dict[str, object]:
        """Return the role, the term and the leader as plain data, for reports and for the search of the simulator."""
        return {"role": self.role, "term": self.kept.term, "leader": self.lead.leader if self.lead else ""}

    def _controller_up(self, event: ControllerUp) -> None:
        """Become the leader if the controller on this node was started in the term in which this agent was elected.

        An earlier agent of this node may have started that controller.
        """
        if event.term == self.kept.term and self.kept.voted_for == self.me:
            if self.lead is None or self.lead.term != event.term:
                self._up = frozenset()  # the list of an earlier controller: nodes may have come back since
            self.role = "leader"
            self.lead = Lead(leader=self.me, term=event.term, host=event.host, port=event.port)
            self._cancel("campaign", "alone")
            self._send("*", self.lead)
            if self.kept.electorate is None:
                return
            if self.kept.committed:
                self._publish()  # a voter that was installed again knows no electorate
            else:
                # A change that an earlier leader, or this agent before its restart, has not committed.
                self._issue(msgspec.structs.replace(self.kept.electorate, term=self.kept.term))

    # ---------------------------------------------------------------- campaign

    def _search(self, *, was_leader: bool) -> None:
        """Campaign at once, or wait for this agent's turn to campaign, because it knows no leader."""
        gone = "" if self.lead is None or was_leader else self.lead.leader
        if self.lead is not None and not was_leader:
            self._doubted = self.lead
            self._cancel("doubt")
        self.lead = None
        self.role = "follower"
        self._timer("alone", self.config.alone_s)
        electorate = self.kept.electorate
        if electorate is not None and self.me in electorate.voters and (was_leader or electorate.quorum == 1):
            self._campaign()
        else:
            self._timer("campaign", self._turn_s(gone))

    def _turn_s(self, gone: str = "") -> float:
        """Return the delay in seconds until this voter campaigns; ``gone`` is the lost leader, which gets no turn."""
        electorate = self.kept.electorate
        voters = [v for v in electorate.voters if v != gone] if electorate is not None else []
        place = voters.index(self.me) if self.me in voters else len(voters)
        return self.config.stagger_s * (1 + place)

    def _campaign(self) -> None:
        """Begin a campaign: request a trial vote from all voters."""
        self._waits = False
        self._timer("campaign", self.config.retry_s + self._turn_s())
        electorate = self.kept.electorate
        if electorate is None or self.me not in electorate.voters:
            return  # no vote: wait for an agent that knows the leader
        if self.role == "candidate" and self.kept.term == FIRST_TERM:
            # No other agent asks for votes in this term. A voter that the founder did not reach would be blank in the
            # next term.
            self._ask(electorate, self.kept.term, trial=False)
            return
        self.role = "trying"
        self._promised = frozenset((self.me,))
        self._ask(electorate, self.kept.term + 1, trial=True)
        self._count(electorate)

    def _ask(self, electorate: VoterSet, term: int, *, trial: bool) -> None:
        ask = RequestVote(candidate=self.me, term=term, electorate=electorate, trial=trial, log=self._log)
        for voter in electorate.voters:
            if voter != self.me:
                self._send(voter, ask)

    def _count(self, electorate: VoterSet) -> None:
        if self.role == "trying" and self._elected(electorate, self._promised):
            self._keep(term=self.kept.term + 1, voted_for=self.me)
            self.role = "candidate"
            self._granted = Votes(self.kept.term, frozenset((self.me,)))
            self._ask(electorate, self.kept.term, trial=False)
        if self._stands() and self._elected(electorate, self._granted.voters):
            self.role = "leader"
            self._granted = Votes()
            self._cancel("campaign", "alone")
            self._out.append(StartController(term=self.kept.term))
            self._starting_s = 0.0
            self._timer("starting", self.config.retry_s)

    def _say_it_starts(self) -> None:
        """Request votes again while the controller of this agent starts, so that the voters continue to wait for it."""
        electorate = self.kept.electorate
        self._starting_s += self.config.retry_s
        if self.role == "leader" and self.lead is None and electorate is not None:
            if self._starting_s < self.config.starting_s_max:
                self._timer("starting", self.config.retry_s)
            self._ask(electorate, self.kept.term, trial=False)

    def _stands(self) -> bool:
        """Return True if votes in the present term can elect this agent.

        Slow votes may arrive while this agent already tries the next term.
        """
        return self.role in ("candidate", "trying") and self._granted.term == self.kept.term

    def _elected(self, electorate: VoterSet, votes: frozenset[NodeId]) -> bool:
        return len(votes & set(electorate.voters)) >= electorate.quorum

    def _asked(self, ask: RequestVote) -> None:
        kept = self.kept
        unspent = ask.term > kept.term or (
            not ask.trial and ask.term == kept.term and kept.voted_for in ("", ask.candidate)
        )
        outdated = kept.electorate is not None and ask.electorate < kept.electorate
        outdated = outdated or ask.log < self._log
        # Otherwise two voters could refer each other to a controller that neither of them can reach.
        lead = None if self.lead == self._doubted else self.lead
        granted = unspent and not outdated and lead is None and self.role != "leader"
        granted = granted and not (ask.trial and self._waits)
        if granted and not ask.trial:
            electorate, committed = kept.electorate, kept.committed
            if electorate is None and ask.term == FIRST_TERM:
                electorate, committed = ask.electorate, True
            if (kept.term, kept.voted_for) != (ask.term, ask.candidate):
                self._keep(term=ask.term, voted_for=ask.candidate, electorate=electorate, committed=committed)
            self.role = "follower"
            self.lead = None
            self._wait()
        term = ask.term if granted else self.kept.term
        blank = kept.electorate is None
        reply = VoteReply(voter=self.me, term=term, trial=ask.trial, granted=granted, blank=blank)
        self._send(ask.candidate, reply)
        if not granted and lead is not None:
            self._send(ask.candidate, lead)

    def _wait(self) -> None:
        """Wait for the start of the elected agent's controller.

        A start on a busy host takes long. The elected agent then requests votes again, and this voter waits longer.
        """
        self._waits = True
        self._timer("campaign", self.config.starting_s + self._turn_s())
        self._timer("alone", self.config.starting_s + self.config.alone_s)  # the elected agent has a majority

    def _answered(self, said: VoteReply) -> None:
        if not said.granted:
            self._meet_term(said.term)
            return
        electorate = self.kept.electorate
        wanted = self.kept.term + 1 if said.trial else self.kept.term
        counts = self.role == "trying" if said.trial else self._stands()
        if not counts or said.term != wanted or electorate is None:
            return
        if not said.blank or said.term == FIRST_TERM:
            if said.trial:
                self._promised |= {said.voter}
            else:
                self._granted = Votes(said.term, self._granted.voters | {said.voter})
            self._count(electorate)
        elif self._has_witness(electorate) and self._claimed.number <= electorate.number:
            self._claim(electorate.number + 1, (self.me,))  # the only other voter has no vote to wait for

    def _meet_term(self, term: int, leader: str = "") -> None:
        """Adopt a newer term. If this agent led an older term, stop its controller and campaign again.

        Args:
            term: the term that another agent has named.
            leader: the leader of that term; empty if unknown. This agent votes for no other candidate in that term.
        """
        if term <= self.kept.term:
            return
        was_leader, self.role = self.role == "leader", "follower"
        self._keep(term=term, voted_for=leader)
        if was_leader:
            self._out.append(StepDown(reason=f"an agent has seen term {term}"))
            self._search(was_leader=True)

    def copy(self) -> Election:
        """Return an independent copy of this state machine, for the search of the simulator."""
        twin = copy.copy(self)
        twin._out = []
        return twin

    def _hear_of(self, lead: Lead) -> None:
        if lead.leader == self.me:
            return
        if lead.term < self.kept.term:
            said = VoteReply(voter=self.me, term=self.kept.term, trial=False, granted=False)
            self._send(lead.leader, said)
            return
        if self.lead == lead:
            return
        if lead.term > self.kept.term:
            self._keep(term=lead.term, voted_for=lead.leader)
        if self.role == "leader":
            self._out.append(StepDown(reason=f"{lead.leader} leads in term {lead.term}"))
        self.role = "follower"
        self.lead = lead
        if lead == self._doubted:
            self._timer("doubt", self.config.doubt_s)
        self._waits = False
        self._cancel("campaign", "alone")
        self._out.append(Follow(lead=lead))

    def _tick(self, name: str) -> None:
        if name == "amend" and self.role == "leader":
            self._publish()
        elif name == "starting":
            self._say_it_starts()
        elif name == "doubt":
            self._doubted = None  # the connection was not lost again
        elif self.lead is not None or self.role == "leader":
            return
        elif name == "campaign":
            self._campaign()
        elif name == "alone":
            self._alone()

    def _alone(self) -> None:
        kept = self.kept.electorate
        if kept is None and self._log == (0, 0):
            # This node has no state of the job to save, and another job may be founded. But a delayed message of a
            # leader that has ended since then may still give it an electorate.
            self._timer("alone", self.config.alone_s)
        elif kept is None or not self._has_witness(kept):
            self._give_up("no majority of the agents can be reached")
        elif self._claimed.number > kept.number:
            self._give_up("neither the other agent nor the witness answers")
        else:
            self._claim(kept.number + 1, (self.me,), is_last=True)
            self._timer("alone", self.config.alone_s)

    def _has_witness(self, electorate: VoterSet) -> bool:
        """Return True if this agent is one of two voters, and a witness decides which of them continues."""
        pair = len(electorate.voters) == 2 and self.me in electorate.voters
        return pair and electorate.witness and self.kept.committed

    def _give_up(self, reason: str) -> None:
        self.role = "alone"
        self._cancel("campaign", "alone", "amend")
        self._out.append(GiveUp(reason=reason))

    # ---------------------------------------------------------------- electorate

    def _amend(self) -> None:
        """Issue the next change of the electorate if this agent leads, a change is needed, and none is in progress."""
        kept = self.kept.electorate
        if self.role != "leader" or self.lead is None or kept is None or not self.kept.committed:
            return
        if self._claimed.number > kept.number or self.me not in self._up:
            return  # the witness is being asked, or this agent has not received a list of nodes yet
        joined = sorted(self._up - set(kept.voters))
        lost = sorted(set(kept.voters) - self._up - {self.me})
        smallest = 2 if kept.witness else 3
        if joined:
            voters = (*kept.voters, joined[0])
        elif lost and len(kept.voters) > smallest:
            voters = tuple(v for v in kept.voters if v != lost[0])
        else:
            return
        if kept.term != self.kept.term:
            self._issue(msgspec.structs.replace(kept, term=self.kept.term))
        elif kept.witness:
            self._claim(kept.number + 1, voters)
        else:
            self._issue(VoterSet(self.kept.term, kept.number + 1, voters))

    def _claim(self, number: int, voters: tuple[NodeId, ...], *, is_last: bool = False) -> None:
        self._claimed = Asked(number, is_last)
        self._out.append(Claim(number=number, voters=voters))

    def _issue(self, electorate: VoterSet) -> None:
        before = self.kept.electorate
        single = electorate.quorum == 1 or (before is not None and before.quorum == 1)
        self._acks = frozenset((self.me,))
        self._keep(electorate=electorate, committed=single)
        self._publish()
        if self.kept.committed:
            self._amend()

    def _greet(self, node_id: NodeId) -> None:
        """Send the leader to an agent that has connected and, if this agent leads, also the electorate.

        A voter that was started again in an empty run directory knows no electorate, and could not vote otherwise.
        """
        if self.lead is None:
            return
        self._send(node_id, self.lead)
        electorate = self.kept.electorate
        if self.role == "leader" and electorate is not None and node_id in electorate.voters:
            self._send(node_id, self._change(electorate))

    def _change(self, electorate: VoterSet) -> ConfigChange:
        return ConfigChange(
            leader=self.me, term=self.kept.term, electorate=electorate, committed=self.kept.committed
        )

    def _publish(self) -> None:
        electorate = self.kept.electorate
        assert electorate is not None
        self._send("*", self._change(electorate))
        if not self.kept.committed:
            self._timer("amend", self.config.retry_s)

    def _amended(self, event: ConfigChange) -> None:
        if event.term < self.kept.term:
            said = VoteReply(voter=self.me, term=self.kept.term, trial=False, granted=False)
            self._send(event.leader, said)
            return
        self._meet_term(event.term, event.leader)  # no message has named the leader of this term yet
        if self.role == "candidate":
            self.role = "follower"  # the other candidate of this term leads
        kept = self.kept
        if kept.electorate is None or event.electorate >= kept.electorate:
            if (event.electorate, event.committed) != (kept.electorate, kept.committed):
                self._keep(electorate=event.electorate, committed=event.committed)
            self._send(event.leader, ConfigChangeAck(voter=self.me, electorate=event.electorate))

    def _acknowledged(self, said: ConfigChangeAck) -> None:
        electorate = self.kept.electorate
        if self.role != "leader" or said.electorate != electorate or self.kept.committed:
            return
        self._acks = self._acks | {said.voter}
        if len(self._acks & set(electorate.voters)) >= electorate.quorum:
            self._keep(committed=True)
            self._publish()
            self._amend()

    def _witnessed(self, said: WitnessReply) -> None:
        kept = self.kept.electorate
        if kept is None or said.number != self._claimed.number or said.number <= kept.number:
            return
        if not said.voters:
            was_last = self._claimed.is_last
            # The witness was not reached: the next change, vote or time limit asks again.
            self._claimed = Asked()
            if self.role != "leader" and was_last:
                self._give_up("neither the other agent nor the witness answers")
        elif self.role == "leader":
            if self.me in said.voters:
                self._issue(VoterSet(self.kept.term, said.number, said.voters, witness=True))
            else:
                self._out.append(StepDown(reason="the witness chose another agent"))
                self._give_up("the witness chose another agent")
        elif said.voters == (self.me,):
            self._keep(
                electorate=VoterSet(self.kept.term, said.number, said.voters, witness=True), committed=True
            )
            self.lead = None  # a leader that was elected in the meantime cannot continue
            self._campaign()
        else:
            self._give_up("the witness chose another agent")

    # ---------------------------------------------------------------- out

    def _keep(self, **changes: object) -> None:
        self.kept = msgspec.structs.replace(self.kept, **changes)
        kept = self.kept
        self._out.append(
            PersistHardState(
                term=kept.term,
                voted_for=kept.voted_for,
                electorate=kept.electorate,
                committed=kept.committed,
            )
        )

    def _send(self, to: str, message: Message) -> None:
        self._out.append(Send(to=f"node:{to}", message=message))

    def _timer(self, name: str, delay_s: float) -> None:
        self._out.append(SetTimer(name=name, delay_s=delay_s))

    def _cancel(self, *names: str) -> None:
        self._out += [CancelTimer(name=name) for name in names]

    def _take(self) -> list[Command]:
        out, self._out = self._out, []
        return out
