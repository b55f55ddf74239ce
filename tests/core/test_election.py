"""One agent's part of an election, event by event."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.core.election import Election, ElectionConfig, HardState
from holdfast.core.ids import NodeId
from holdfast.core.protocol.messages import (
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

A, B, C, D = (NodeId(f"node{i}") for i in range(4))


def nodes(*who: NodeId, witness: bool = False) -> HardState:
    return HardState(electorate=VoterSet(0, 1, who, witness), committed=True)


def agent(me: NodeId, kept: HardState) -> Election:
    machine = Election(ElectionConfig(node_id=me), kept)
    machine.start(0.0)
    return machine


def post(machine: Election, event: Message) -> list[Command]:
    commands = machine.handle(0.0, event)
    machine.check()
    return commands


def said(commands: list[Command], kind: type[Message]) -> list[tuple[str, Message]]:
    return [(c.to, c.message) for c in commands if isinstance(c, Send) and isinstance(c.message, kind)]


def lead(machine: Election, *others: NodeId) -> list[Command]:
    """Make ``machine`` the leader with the votes of ``others``."""
    post(machine, Tick(name="campaign"))
    for voter in others:
        term = machine.kept.term + 1
        post(machine, VoteReply(voter=voter, term=term, trial=True, granted=True))
    done: list[Command] = []
    for voter in others:
        done += post(machine, VoteReply(voter=voter, term=machine.kept.term, trial=False, granted=True))
    return done + post(machine, ControllerUp(term=machine.kept.term, host="h", port=1))


def test_one_node_elects_itself_at_once_and_again_when_its_controller_dies() -> None:
    machine = agent(A, HardState())
    first = post(machine, Founded(voters=(A,), witness=False))
    again = post(machine, LeaderLost())
    assert [c.term for c in first + again if isinstance(c, StartController)] == [1, 2]
    kinds = [type(c) for c in again]
    assert kinds.index(PersistHardState) < kinds.index(StartController), "the term is kept before it is used"


def test_a_trial_binds_nobody_and_a_vote_is_given_once() -> None:
    machine = agent(A, nodes(A, B, C))
    ask = RequestVote(candidate=B, term=1, electorate=VoterSet(0, 1, (A, B, C)), trial=True)
    assert not any(isinstance(c, PersistHardState) for c in post(machine, ask))
    ask = RequestVote(candidate=B, term=1, electorate=VoterSet(0, 1, (A, B, C)), trial=False)
    ((to, answer),) = said(post(machine, ask), VoteReply)
    assert to == f"node:{B}" and isinstance(answer, VoteReply) and answer.granted
    ask = RequestVote(candidate=C, term=1, electorate=VoterSet(0, 1, (A, B, C)), trial=False)
    ((_, answer),) = said(post(machine, ask), VoteReply)
    assert isinstance(answer, VoteReply) and not answer.granted
    assert (machine.kept.term, machine.kept.voted_for) == (1, B)


def test_who_has_voted_waits_as_long_as_the_controller_of_that_one_starts() -> None:
    """A controller may need seconds to start.

    Regression: three agents did not wait and deposed each other for a minute.
    """
    machine, electorate = agent(A, nodes(A, B, C)), VoterSet(0, 1, (A, B, C))
    vote, trial = (
        RequestVote(candidate=B, term=1, electorate=electorate, trial=False),
        RequestVote(candidate=C, term=2, electorate=electorate, trial=True),
    )
    assert any(isinstance(c, PersistHardState) for c in post(machine, vote))
    for _ in range(3):
        again = post(machine, vote)
        assert {c.name for c in again if isinstance(c, SetTimer)} == {"campaign", "alone"}
        assert not any(isinstance(c, PersistHardState) for c in again), "it is on the disk"
        ((_, answer),) = said(post(machine, trial), VoteReply)
        assert isinstance(answer, VoteReply) and not answer.granted
    post(machine, Tick(name="campaign"))
    ((_, answer),) = said(post(machine, trial), VoteReply)
    assert isinstance(answer, VoteReply) and answer.granted


def test_who_is_elected_says_so_until_its_controller_is_up() -> None:
    machine = agent(A, nodes(A, B, C))
    post(machine, Tick(name="campaign"))
    post(machine, VoteReply(voter=B, term=1, trial=True, granted=True))
    post(machine, VoteReply(voter=B, term=1, trial=False, granted=True))
    again = post(machine, Tick(name="starting"))
    assert [to for to, _ in said(again, RequestVote)] == [f"node:{B}", f"node:{C}"]
    assert "starting" in {c.name for c in again if isinstance(c, SetTimer)}
    post(machine, ControllerUp(term=1, host="h", port=1))
    assert post(machine, Tick(name="starting")) == []


def test_who_hears_a_leader_deposes_nobody_and_says_who_it_is() -> None:
    machine = agent(A, nodes(A, B, C))
    known = Lead(leader=B, term=1, host="b", port=1)
    assert [c for c in post(machine, known) if isinstance(c, Follow)] == [Follow(lead=known)]
    ask = RequestVote(candidate=C, term=2, electorate=VoterSet(0, 1, (A, B, C)), trial=True)
    commands = post(machine, ask)
    assert [m for _, m in said(commands, VoteReply) if isinstance(m, VoteReply) and m.granted] == []
    assert said(commands, Lead) == [(f"node:{C}", known)]


def test_a_leader_that_meets_a_later_term_stands_down_and_runs_again() -> None:
    machine = agent(A, nodes(A, B, C))
    lead(machine, B)
    commands = post(machine, VoteReply(voter=C, term=7, trial=False, granted=False))
    assert any(isinstance(c, StepDown) for c in commands)
    asks = [m for _, m in said(commands, RequestVote) if isinstance(m, RequestVote)]
    assert {(m.term, m.trial) for m in asks} == {(8, True)}


def test_a_minority_gives_up_and_answers_nobody_any_more() -> None:
    machine = agent(A, nodes(A, B, C))
    post(machine, LeaderLost())
    assert any(isinstance(c, GiveUp) for c in post(machine, Tick(name="alone")))
    ask = RequestVote(candidate=B, term=9, electorate=VoterSet(0, 1, (A, B, C)), trial=False)
    assert post(machine, ask) == []


def test_an_agent_that_has_nothing_of_the_job_waits_for_another_one_and_saves_nothing() -> None:
    """Regression: it had heard of a leader that was about to end, and then decided alone about a job without ranks."""
    machine = agent(A, HardState())
    post(machine, Lead(leader=B, term=3, host="h", port=1))
    post(machine, LeaderLost())
    again = SetTimer(name="alone", delay_s=machine.config.alone_s)
    assert post(machine, Tick(name="alone")) == [again] and machine.role == "follower"
    post(machine, LogHeld(term=3, number=8))
    assert [type(c) for c in post(machine, Tick(name="alone")) if isinstance(c, GiveUp)] == [GiveUp]


def test_an_agent_that_hears_late_of_an_electorate_that_is_gone_gives_up() -> None:
    """Regression: its only look was before this message, so it asked for votes for ever."""
    machine = agent(A, HardState())
    post(machine, Lead(leader=B, term=2, host="h", port=1))
    post(machine, LeaderLost())
    post(machine, Tick(name="alone"))
    late = VoterSet(2, 3, (B, C, A))
    post(machine, ConfigChange(leader=B, term=2, electorate=late, committed=False))
    assert machine.kept.electorate == late
    assert [type(c) for c in post(machine, Tick(name="alone")) if isinstance(c, GiveUp)] == [GiveUp]


def test_who_gave_up_runs_its_controller_again_when_that_dies() -> None:
    machine = agent(A, nodes(A, B))
    post(machine, LeaderLost())
    post(machine, Tick(name="alone"))
    assert [type(c) for c in post(machine, LeaderLost()) if isinstance(c, GiveUp)] == [GiveUp]


def test_of_two_with_a_witness_one_goes_on() -> None:
    first, second = (agent(me, nodes(A, B, witness=True)) for me in (A, B))
    for machine in (first, second):
        post(machine, LeaderLost())
        claims = [c for c in post(machine, Tick(name="alone")) if isinstance(c, Claim)]
        assert [(c.number, c.voters) for c in claims] == [(2, (machine.me,))]
    won = post(first, WitnessReply(number=2, voters=(A,)))
    lost = post(second, WitnessReply(number=2, voters=(A,)))
    assert any(isinstance(c, StartController) for c in won) and any(isinstance(c, GiveUp) for c in lost)
    # The node that was left out is refused, even with a term that no node has seen.
    ask = RequestVote(candidate=B, term=99, electorate=VoterSet(0, 1, (A, B), True), trial=False)
    assert [m for _, m in said(post(first, ask), VoteReply) if isinstance(m, VoteReply) and m.granted] == []


def test_of_two_with_a_witness_the_one_that_remembers_goes_on_at_once() -> None:
    """The other host was installed again.

    Regression: the voter waited as long as for a host that is lost. The witness may not be reached at the first time.
    """
    machine, electorate = agent(A, nodes(A, B, witness=True)), VoterSet(0, 1, (A, B), True)
    post(machine, LeaderLost())
    for _ in range(2):
        ask = RequestVote(candidate=A, term=2, electorate=electorate, trial=True)
        machine.kept = msgspec.structs.replace(machine.kept, term=1)
        post(machine, Tick(name="campaign"))
        ((_, reply),) = said(post(agent(B, HardState()), ask), VoteReply)
        claims = [c for c in post(machine, reply) if isinstance(c, Claim)]
        assert [(c.number, c.voters) for c in claims] == [(2, (A,))]
        assert not post(machine, reply), "the witness is asked once"
        assert not post(machine, WitnessReply(number=2, voters=()))
    post(machine, reply)
    done = post(machine, WitnessReply(number=2, voters=(A,)))
    assert any(isinstance(c, StartController) for c in done) and machine.kept.term == 2


def test_a_voter_that_took_a_second_one_and_loses_it_at_once_asks_the_witness_again() -> None:
    """Regression: the change waited for the second voter, and without it the first one gave up (seed 1308)."""
    machine = agent(A, msgspec.structs.replace(nodes(A, witness=True), term=1))
    post(machine, ControllerUp(term=machine.kept.term, host="h", port=1))
    claims = [c for c in post(machine, Rolled(up=(A, B))) if isinstance(c, Claim)]
    assert [(c.number, c.voters) for c in claims] == [(2, (A, B))]
    post(machine, WitnessReply(number=2, voters=(A, B)))
    assert machine.kept.committed
    post(machine, LeaderLost())
    claims = [c for c in post(machine, Tick(name="alone")) if isinstance(c, Claim)]
    assert [(c.number, c.voters) for c in claims] == [(3, (A,))]


def test_a_host_that_has_lost_its_vote_does_not_ask_the_witness() -> None:
    """Regression: the witness let it lead the job of the two voters that were left, with an older log."""
    machine = agent(C, nodes(A, B, witness=True))
    post(machine, LeaderLost())
    post(machine, LogHeld(term=1, number=8))
    done = post(machine, Tick(name="alone"))
    assert any(isinstance(c, GiveUp) for c in done) and not any(isinstance(c, Claim) for c in done)


def test_of_two_without_a_witness_none_goes_on() -> None:
    machine = agent(A, nodes(A, B))
    post(machine, LeaderLost())
    commands = post(machine, Tick(name="alone"))
    assert any(isinstance(c, GiveUp) for c in commands) and not any(isinstance(c, Claim) for c in commands)


def test_a_lost_voter_leaves_and_a_new_one_joins_one_at_a_time() -> None:
    machine = agent(A, nodes(A, B, C, D))
    lead(machine, B, C)
    kept = []
    for _ in range(3):
        commands = post(machine, Rolled(up=(A, B, C)))
        kept += [c.electorate for c in commands if isinstance(c, PersistHardState)]
        electorate = machine.kept.electorate
        assert electorate is not None
        for voter in (B, C):
            post(machine, ConfigChangeAck(voter=voter, electorate=electorate))
    assert machine.kept.committed and machine.kept.electorate == VoterSet(1, 2, (A, B, C))
    assert kept[0] == VoterSet(1, 1, (A, B, C, D)), "first written again in its own term"


def test_an_agent_that_was_restarted_drops_nobody_before_it_is_told_who_is_there() -> None:
    machine = agent(A, msgspec.structs.replace(nodes(A, B, C, D), term=1, voted_for=A, committed=False))
    commands = post(machine, ControllerUp(term=1, host="h", port=1))
    electorate = VoterSet(1, 1, (A, B, C, D))
    assert [m.electorate for _, m in said(commands, ConfigChange) if isinstance(m, ConfigChange)] == [
        electorate
    ]
    for voter in (B, C):
        post(machine, ConfigChangeAck(voter=voter, electorate=electorate))
    assert machine.kept.committed and machine.kept.electorate == electorate


def test_a_leader_of_a_new_term_waits_for_the_list_of_its_own_controller() -> None:
    """The list of the term before lacks a node that has come back.

    Regression: the leader removed the vote of this node, and kept that of a silent one (seed 207860123606).
    """
    machine = agent(A, msgspec.structs.replace(nodes(A, B, C, D), term=1))
    lead(machine, B, C)
    post(machine, Rolled(up=(A, C, D)))  # B is silent
    post(machine, LeaderLost())
    commands = lead(machine, B, D)
    again = machine.kept.electorate
    assert again is not None and again.voters == (A, B, C, D)
    for voter in (B, D):
        commands += post(machine, ConfigChangeAck(voter=voter, electorate=again))
    assert machine.kept.committed and machine.kept.electorate == again, "no voter is removed"
    post(machine, ControllerUp(term=machine.kept.term, host="h", port=1))
    changes = [m for _, m in said(post(machine, Rolled(up=(A, B, D))), ConfigChange)]
    assert [m.electorate.voters for m in changes if isinstance(m, ConfigChange)] == [(A, B, D)]


def test_a_voter_keeps_what_the_leader_issues_and_refuses_who_knows_less() -> None:
    machine = agent(C, nodes(A, B, C, D))
    newer = VoterSet(3, 2, (A, B, C))
    post(machine, ConfigChange(leader=A, term=3, electorate=newer, committed=False))
    assert machine.kept.electorate == newer and machine.kept.term == 3
    ask = RequestVote(candidate=D, term=9, electorate=VoterSet(0, 1, (A, B, C, D)), trial=False)
    assert [m for _, m in said(post(machine, ask), VoteReply) if isinstance(m, VoteReply) and m.granted] == []


@pytest.mark.parametrize("leads", [True, False])
def test_a_change_of_a_later_leader_ends_what_an_older_one_is_at(leads: bool) -> None:
    """The change arrives before the news of its leader.

    Regression: two leaders could have issued different voters under one number.
    """
    machine = agent(A, nodes(A, B, C))
    if leads:
        lead(machine, B)
    else:
        post(machine, Tick(name="campaign"))
        post(machine, VoteReply(voter=B, term=1, trial=True, granted=True))
    assert machine.role == ("leader" if leads else "candidate")
    wider = VoterSet(2, 2, (A, B, C, D))
    done = post(machine, ConfigChange(leader=B, term=2, electorate=wider, committed=False))
    assert any(isinstance(c, StepDown) for c in done) == leads
    assert (machine.kept.term, machine.kept.electorate) == (2, wider)
    assert not said(post(machine, Rolled(up=(A, C))), ConfigChange)


def test_a_voter_that_has_lost_its_files_hears_who_votes_and_replaces_the_leader() -> None:
    """The leader still counts the host as a voter when the host is started again with an empty run directory."""
    leader = agent(A, nodes(A, B, C))
    lead(leader, B)
    told = post(leader, PeerHere(node_id=B))
    assert [to for to, _ in said(told, ConfigChange)] == [f"node:{B}"]
    restarted = agent(B, HardState())
    for _, message in (*said(told, Lead), *said(told, ConfigChange)):
        post(restarted, message)
    assert restarted.kept.electorate == leader.kept.electorate and restarted.kept.committed
    asked = [*post(restarted, LeaderLost()), *post(restarted, Tick(name="campaign"))]
    assert {to for to, _ in said(asked, RequestVote)} == {f"node:{A}", f"node:{C}"}
    assert not said(post(leader, PeerHere(node_id=NodeId("stranger"))), ConfigChange)


@pytest.mark.parametrize("voters", [(A, B), (A, B, C), (A, B, C, D)])
def test_the_vote_of_a_host_that_was_installed_again_does_not_count(voters: tuple[NodeId, ...]) -> None:
    """Regression: its second vote in a term made a second leader of that term."""
    electorate = VoterSet(0, 1, voters)
    candidate = agent(A, msgspec.structs.replace(nodes(*voters), term=1))
    post(candidate, Tick(name="campaign"))
    fresh = agent(B, HardState())
    for trial, stage, after in ((True, "trying", "candidate"), (False, "candidate", "leader")):
        for voter in voters[2 : electorate.quorum]:
            post(candidate, VoteReply(voter=voter, term=2, trial=trial, granted=True))
        ask = RequestVote(candidate=A, term=2, electorate=electorate, trial=trial)
        ((_, reply),) = said(post(fresh, ask), VoteReply)
        assert reply == VoteReply(voter=B, term=2, trial=trial, granted=True, blank=True)
        post(candidate, reply)
        assert candidate.role == stage and fresh.kept.electorate is None
        post(candidate, msgspec.structs.replace(reply, blank=False))
        assert candidate.role == after


def test_the_founder_counts_every_vote_of_the_first_term_and_asks_again_in_it() -> None:
    founder, other = agent(A, HardState()), agent(B, HardState())
    post(founder, Founded(voters=(A, B, C), witness=False))
    post(founder, VoteReply(voter=B, term=1, trial=True, granted=True, blank=True))
    again = said(post(founder, Tick(name="campaign")), RequestVote)
    assert {(ask.term, ask.trial) for _, ask in again if isinstance(ask, RequestVote)} == {(1, False)}
    ((_, reply),) = said(post(other, again[0][1]), VoteReply)
    assert other.kept.electorate == founder.kept.electorate
    post(founder, reply)
    assert founder.role == "leader"


def test_votes_that_come_after_the_next_trial_has_begun_elect_once() -> None:
    """Regression: on a network with answers after seconds each candidate dropped the votes it had won (seed 1313)."""
    machine = agent(A, msgspec.structs.replace(nodes(A, B, C), term=1))
    post(machine, Tick(name="campaign"))
    post(machine, VoteReply(voter=B, term=2, trial=True, granted=True))
    post(machine, Tick(name="campaign"))
    assert machine.role == "trying"
    vote = VoteReply(voter=B, term=2, trial=False, granted=True)
    done = post(machine, vote)
    assert [c.term for c in done if isinstance(c, StartController)] == [2]
    post(machine, LeaderLost())
    assert machine.role == "trying" and not post(machine, vote), "a term is led once"


def test_a_new_leader_tells_all_who_votes_and_that_its_term_is_used_up() -> None:
    leader = agent(A, nodes(A, B, C))
    up = lead(leader, B)
    fresh = agent(C, HardState())
    for _, message in said(up, ConfigChange):
        post(fresh, message)
    assert fresh.kept.electorate == leader.kept.electorate
    ask = RequestVote(candidate=B, term=1, electorate=VoterSet(0, 1, (A, B, C)), trial=False)
    ((_, reply),) = said(post(fresh, ask), VoteReply)
    assert isinstance(reply, VoteReply) and not reply.granted


def test_a_candidate_with_an_older_log_is_refused() -> None:
    """Its host lost power, and the lines that it had not synced: it would take the job for a new one."""
    voter = agent(B, nodes(A, B, C))
    post(voter, LogHeld(term=1, number=7))
    for trial in (True, False):
        for log, granted in (((0, 0), False), ((1, 6), False), ((1, 7), True), ((2, 1), True)):
            ask = RequestVote(candidate=A, term=3, electorate=VoterSet(0, 1, (A, B, C)), trial=trial, log=log)
            (_, reply), *_ = said(post(agent_like(voter), ask), VoteReply)
            assert isinstance(reply, VoteReply) and reply.granted is granted, f"{log}, trial {trial}"


def test_a_candidate_names_the_newest_line_of_its_log() -> None:
    candidate = agent(A, nodes(A, B, C))
    post(candidate, LogHeld(term=1, number=7))
    asks = said(post(candidate, Tick(name="campaign")), RequestVote)
    assert asks and all(isinstance(ask, RequestVote) and ask.log == (1, 7) for _, ask in asks)


def agent_like(machine: Election) -> Election:
    """A copy, which votes on its own."""
    return machine.copy()


def test_a_voter_does_not_send_others_to_a_controller_that_it_cannot_reach() -> None:
    """Regression: two voters named the lost leader to each other in turn, and elected none for up to 50 s."""
    lead = Lead(leader=A, term=1, host="h", port=1)
    ask = RequestVote(
        candidate=C, term=2, electorate=VoterSet(0, 1, (A, B, C), False), trial=True, log=(0, 0)
    )
    voter = agent(B, msgspec.structs.replace(nodes(A, B, C), term=1))
    post(voter, lead)
    (refused,) = said(post(voter, ask), VoteReply)
    assert isinstance(refused[1], VoteReply) and not refused[1].granted, "it follows a leader"
    post(voter, LeaderLost())
    assert Follow(lead=lead) in post(voter, lead), "another voter still names that leader"
    answers = post(voter, ask)
    assert not said(answers, Lead)
    assert said(answers, VoteReply) == [("node:node2", VoteReply(voter=B, term=2, trial=True, granted=True))]
    post(voter, Tick(name="doubt"))
    assert said(post(voter, ask), Lead) == [("node:node2", lead)], "its new connection has held"
