"""Settings of controller and agent: time limits and other limits, in seconds unless the name says otherwise."""

from __future__ import annotations

import msgspec


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the controller of one job. The defaults suit one machine."""

    run_id: str
    root_before: str = ""  # where an earlier start of this run has saved
    world_size: int
    nnodes: int = 1
    # Fewest nodes to continue with when some are lost and no spare node waits; 0: never with fewer.
    nodes_min: int = 0
    # Agents that elect the controller. A node counts as lost only while a majority of them is connected.
    voters: tuple[str, ...] = ()
    # Other hosts may run a controller of this job, so the log of this host may lack member ids that are in use.
    several: bool = False
    # Above 0: no majority can be reached, so seal the committed step, and end. The value is the number of this agent.
    alone: int = 0
    term: int = 1  # counts controllers of this run; above 1: a successor, which derives the state of the job
    library: bool = False  # another launcher started the workers: never start any

    max_restarts: int = 16  # faults handled within the window below
    restart_window_s: float = 3600.0
    # A node with so many faults of its host within the window has no ranks where others have room; 0: never.
    node_faults_max: int = 3
    node_window_s: float = 3600.0
    verify: bool = False  # compare copies of the state before it is saved or given away
    on_fault: str = "auto"  # see ``ladder.Ladder.parse``
    replacements_max: int = 2  # newcomers lost before they joined, until all workers are restarted
    retries_per_step_max: int = 2  # retries of one step in place, until its workers are restarted
    save_attempts_max: int = 3  # last-gasp attempts of one recovery

    beat_s: float = 1.0  # heartbeat of an agent
    lost_s: float = 3.0  # an agent is suspected after this time without a heartbeat
    adoption_s: float = 10.0  # a suspected agent is lost when no successor has joined within this time
    rejoin_s: float = 2.0  # a new controller counts a node as lost that has not reported within this
    startup_s: float = 120.0  # agents and workers have to report within this time
    fault_grace_s: float = 0.3  # after a broken collective: time to wait for a death that explains it
    quiesce_s: float = 5.0  # a fenced worker leaves its collectives within this time, or is killed
    offer_s: float = 15.0  # a survivor serves its state to newcomers within this, or is killed
    starting_quiesce_s: float = 1.0  # the same as ``quiesce_s``, for a worker that has no session yet
    # A node that is asked to leave departs alone if no other node was asked within this time.
    depart_s: float = 5.0
    hold_s: float = 10.0  # a move of ranks waits this long for all ranks to stop at the end of a step
    failing_s: float = 2.0  # a worker that reported its exception exits within this, or is killed
    gasp_s: float = 60.0  # a source writes its share of a last-gasp checkpoint within this, or is killed
    leave_s: float = 5.0  # a worker ordered to leave exits within this, or is killed
    kill_s: float = 30.0  # a killed process that still exists after this time is given up
    term_grace_s: float = 10.0  # SIGTERM before SIGKILL, for scripts without a session
    grace_s: float = 300.0  # deadline of a graceful exit that a worker asked for
    patience_s: float = 1800.0  # a stalled job in which no rank is to blame is fenced after this time
    # A rank is replaced when its steps take this many times as long as the others'; 0: never.
    replace_slower_than: float = 0.0


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the agent of one node."""

    node_id: str
    slots: int
    pid: int = 0
    beat_s: float = 1.0
    host: str = ""  # address for other nodes; empty: there are no other nodes
    port: int = 0  # a free port at ``host``
    grace_s: float = 300.0  # deadline of the graceful exit that a lost launcher causes
    pending_max: int = 10_000  # messages kept while there is no controller
    restarts_max: int = 16  # consecutive restarts of the controller, none of which stayed up for ``steady_s``
    steady_s: float = 1.0
    spares: int = 0  # processes built beforehand
    world_size: int = 0  # number of ranks that spares are built for, until the job reports another
    spare_delay_s: float = 1.0  # until a spare that died is built again, doubled by each consecutive failure
    called_s: float = 1.0  # a spare that is called answers within this, or is killed
    spare_failures_max: int = 3  # consecutive failed builds after which no more spares are built

    @property
    def node_of_several(self) -> str:
        """The name of this node; empty if it is the only node of the job."""
        return self.node_id if self.host else ""
