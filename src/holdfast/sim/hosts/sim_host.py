"""One simulated host: power, clock, disk, and the processes of the control plane on it."""

from __future__ import annotations

from holdfast.core.ids import NodeId
from holdfast.sim.hosts.controller_process import ControllerProcess
from holdfast.sim.hosts.sim_council import SimCouncil
from holdfast.sim.hosts.sim_disk import SimDisk


class SimHost:
    """One simulated host.

    Attributes:
        slots: number of ranks that the host can hold.
        life: number of power losses. Actions that were scheduled before a power loss never happen.
        booting: an agent is about to start.
        in_job: the run directory of the host contains the name of the job.
        left: the agent of the host has ended permanently.
        offset_s: reading of the host's clock at virtual time 0.
        rate: seconds on the host's clock per second of virtual time.
        is_steady: no fault has delayed its timers or syncs, so what it knows of other hosts is recent.
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
