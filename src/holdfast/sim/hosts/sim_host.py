"""One simulated host: its power, clock and disk, and its agent and controller processes."""

from __future__ import annotations

from holdfast.core.ids import NodeId
from holdfast.sim.hosts.controller_process import ControllerProcess
from holdfast.sim.hosts.sim_council import SimCouncil
from holdfast.sim.hosts.sim_disk import SimDisk


class SimHost:
    """One simulated host.

    Attributes:
        slots: number of ranks that the host can run.
        life: number of power losses so far. An action that was scheduled before a power loss never happens.
        booting: True if an agent is about to start.
        in_job: True if the run directory of the host contains the name of the job.
        left: True if the agent of the host has ended and no other will start.
        offset_s: reading of the host's clock at virtual time 0, in seconds.
        rate: seconds on the host's clock per second of virtual time.
        paused_until_s: virtual time until which nothing runs on the host.
        late_s: longest delay of the host's timers, in virtual seconds.
        is_steady: True if no fault has delayed the host's timers or syncs. Otherwise its data about others may be old.
        council: the election and the connections of the agent; None before the first agent starts.
        process: the newest controller process on the host; None if there was none.
    """

    def __init__(self, node_id: NodeId, slots: int, offset_s: float, rate: float) -> None:
        self.node_id = node_id
        self.slots = slots
        self.disk = SimDisk()
        self.is_up = True
        self.life = 0
        self.booting = True
        self.in_job = False
        self.left = False
        self.offset_s = offset_s
        self.rate = rate
        self.paused_until_s = 0.0
        self.late_s = 0.0
        self.is_steady = True
        self.council: SimCouncil | None = None
        self.process: ControllerProcess | None = None

    @property
    def is_over(self) -> bool:
        """True if no process of the control plane runs on this host or will run on it."""
        return not self.booting and (self.left or not self.is_up)

    def reads(self, now_s: float) -> float:
        """Return the reading of the host's clock at virtual time ``now_s``, in seconds."""
        return self.offset_s + now_s * self.rate
