"""Bounds and limits of the control plane, in one place; seconds unless the name says otherwise."""

from __future__ import annotations

import msgspec


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a controller. The defaults suit one machine."""

    run_id: str
    world_size: int
    nnodes: int = 1
    # Fewest nodes to go on with when some are lost and no spare waits; 0: never with fewer.
    nodes_min: int = 0
    # Agents that elect the controller; a node is lost only while a majority is heard.
    voters: tuple[str, ...] = ()
    # No majority can be reached: seal what is committed, and end; the place of this agent, from 1.
    alone: int = 0
    term: int = 1  # counts controllers of this run; more than 1: a successor, re-derives what is going on
    library: bool = False  # the workers were started by someone else: never start any

    max_restarts: int = 16  # faults answered within the window below
    restart_window_s: float = 3600.0
    verify: bool = False  # copies of the state are compared before it is saved or given away
    on_fault: str = "auto"  # see ``ladder.Ladder.parse``
    replacements_max: int = 2  # newcomers lost before they joined, until all workers are restarted
    retries_per_step_max: int = 2  # retries in place of one step before its workers are restarted
    save_attempts_max: int = 3  # last-gasp attempts of one recovery

    beat_s: float = 1.0  # heartbeat of an agent
    lost_s: float = 3.0  # an agent is suspected after this silence
    adoption_s: float = 10.0  # and given up when no successor has joined after this much more
    rejoin_s: float = 2.0  # a controller that takes over hears from every node within this, or loses it
    startup_s: float = 120.0  # agents and workers have to report within this
    fault_grace_s: float = 0.3  # a collective broke: wait this long for a death that explains it
    quiesce_s: float = 5.0  # leave collectives within this, or be killed
    offer_s: float = 15.0  # a survivor serves its state to newcomers within this, or is killed
    starting_quiesce_s: float = 1.0  # the same for a worker that has no session yet
    depart_s: float = (
        5.0  # a node that is asked to leave departs alone when the others were not asked within this
    )
    hold_s: float = 10.0  # ranks that move wait so long for all to stop at the end of a step
    failing_s: float = 2.0  # a worker that reported its exception exits within this, or is killed
    gasp_s: float = 60.0  # a source writes its share of a last-gasp checkpoint within this, or is killed
    leave_s: float = 5.0  # a worker told to leave exits within this, or is killed
    kill_s: float = 30.0  # a killed process that still exists after this is given up
    term_grace_s: float = 10.0  # SIGTERM before SIGKILL, for scripts without a session
    grace_s: float = 300.0  # deadline of a graceful exit that a worker asked for
    patience_s: float = 1800.0  # a job in which nobody is to blame for standing still is fenced after this
    replace_slower_than: float = 0.0  # a rank whose steps take so many times as long as the others'; 0: never


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an agent."""

    node_id: str
    slots: int
    pid: int = 0
    beat_s: float = 1.0
    host: str = ""  # where other nodes reach this one; empty: there are none
    port: int = 0  # a free port there
    grace_s: float = 300.0  # deadline of the graceful exit that a lost launcher causes
    pending_max: int = 10_000  # messages kept while there is no controller
    restarts_max: int = 16  # controllers started again in a row, when none was heard for ``steady_s``
    steady_s: float = 1.0
    spares: int = 0  # processes built beforehand
    world_size: int = 0  # that they are built for, until the job says another
    spare_delay_s: float = 1.0  # until a spare that died is built again, doubled by each failure in a row
    called_s: float = 1.0  # a spare that is called answers within this, or is killed
    spare_failures_max: int = 3  # builds that failed in a row, until no more are tried

    @property
    def node_of_several(self) -> str:
        """The name of this node, empty when there is no other."""
        return self.node_id if self.host else ""
