"""A nemesis of real processes on three hosts: ``python -m tests.soak.nemesis --minutes 30 [--seed N]`` (root).

**Theory.** Each host is a network namespace with its own disk, its own monotonic clock and one ``holdfast run`` with
the default time limits. One injection at a time is drawn from the seed, applied for some seconds, and undone. The next
injection waits until the job is whole again: a controller that all three agents have joined, no agent that has given
the job up, a process for each rank, and steps committed after the undoing. A training takes some injections, then runs
without pauses to its last step. Two kinds of jobs take turns: ``--nnodes 2:3`` (two ranks and a spare host) and
``--nnodes 3`` (a rank on each host and no spare).

**Invariants.** A violation is a failure, and the directory of its training stays.

1. The job never ends before its last step. A host that was separated, frozen or late may leave with REQUEUE or UNSAVED,
   because the others cannot wait for it. Its command is then started again after the undoing, as a scheduler would do.
   At least one host stays until the job is whole again, and no command ends with another code.
2. A side without a majority starts no generation: its controller is alone, and the log of its host has no
   ``generation_started`` and no ``resumed`` of such a controller.
3. No committed step is lost. The controller itself reports no lost step (``restored``), and its decision (``planned``)
   is at most one step below the highest step that a status page has shown. That one step is possible for a rank that
   was cut off: it alone has seen the last vote, and its step is made again from the same state.
4. No controller and no agent ends with an error of its own (``controller_broken``, ``agent_broken``).
5. The job is whole within 240 s after the undoing: the time of a start (120 s) twice.
6. At the end, all ranks have the weights of an undisturbed run of the same kind, bit for bit.

**Injections.** The switch between the hosts runs in this process, so cuts, loss, delay, copies and overtaken frames
need no netem. They have three lengths: shorter than the silence that makes a node suspected (1.5 s), about as long as
the loss of a node takes (4.5 s), and longer than a side waits without a leader (8 s). A disk is ext4 on a loop device.
It can be filled, and it stands still while the kernel freezes it. A clock cannot jump here: a time namespace takes its
offsets at its creation only, libfaketime 0.9.10 breaks ``time.sleep``, and the clock of this machine is not ours. The
monotonic clocks of the hosts are days apart instead, in every training, where the kernel has time namespaces.

**Figures.** *Seconds to the next committed step* is the longest time without a committed step, from the injection until
the job is whole. An injection that disturbs no step shows about the time of one step (0.15 s) there.

The drawing is pure (``injections.draw``), ``Training`` applies what was drawn, ``work`` makes trainings until the time
is over.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Self

from holdfast.drill.observer import ObservedRun
from holdfast.errors import InternalError
from holdfast.event_log import Event
from holdfast.exit_codes import Exit
from holdfast.runtime.node.process_info import alive, start_ticks
from tests.nodes.cables import Network, Weather, why_not
from tests.nodes.disks import disk, frozen, full
from tests.nodes.jobs import TRAIN, Hosts
from tests.soak.injections import DISKS, HOSTS, KILLS, KINDS, NEVER, STOPS, Injection, Tally, draw

LAYOUTS = {"2:3": 2, "3": 3}
"""The number of ranks by the value of ``--nnodes``."""
FLAP_S = 0.7
SETTLED_S_MAX = 240.0
STEPS, PAUSE_S = 2000, 0.1
INJECTIONS_MAX = 8  # of one training
LAST_SHARE = 0.6  # no injection after this share of the steps
POLL_S, SAID_EVERY_S = 0.05, 25.0
DAY_S = 86400
NO_LOGS = shutil.ignore_patterns("lost+found", "pages", "token", "ballast", "checkpoints", "*.checkpoints")
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LEFT = (Exit.REQUEUE, Exit.UNSAVED)
FLAGS = ("--max-restarts", "10000", "--node-faults", "0")

WEATHER = {
    "delayed frames": Weather(delay_s=0.1),
    "repeated frames": Weather(doubled=0.5),
    "overtaken frames": Weather(overtaken=0.3),
}
LOSS = 0.3


class ApartNetwork(Network):
    """A network of hosts whose monotonic clocks are days apart."""

    def on(self, index: int) -> list[str]:
        """Return the words before a command that make it run on this host, at its time."""
        return [*super().on(index), *_at_time(DAY_S * index)]


def _at_time(offset_s: int) -> list[str]:
    """Return the words before a command that shift its monotonic clock."""
    return ["unshare", "--time", "--fork", "--monotonic", str(offset_s), "--boottime", str(offset_s)]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process, and let it continue if it still exists."""
    began = start_ticks(pid)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if start_ticks(pid) == began:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


class Training:
    """One training on the hosts of a network. Use it as a context manager, which leaves no process and no mount."""

    def __init__(self, net: Network, base: Path, nnodes: str, steps: int, tally: Tally, disks: bool) -> None:
        base.mkdir()
        self.hosts = Hosts(
            net, base, nnodes, TRAIN, (str(steps), str(PAUSE_S), str(base / "out")), flags=FLAGS, torch=True
        )
        self.name = f"--nnodes {nnodes}"
        self.ranks = LAYOUTS[nnodes]
        self.newest = 0  # the highest step that a page has shown as committed
        self.lost = self.again = 0  # steps; starts of commands of hosts that had left
        self._tally = tally
        self._moved_s, self._longest_s = time.monotonic(), 0.0
        self._lines: set[str] = set()  # numbers of known lines of controllers; each is in up to three logs
        self._term = 0  # of the newest controller
        self._joined: dict[str, int] = {}  # pids of agents by node
        self._at_work = False  # no recovery is in progress
        self._gone: set[int] = set()  # hosts that have left since the job was whole
        self._disks = disks
        self._runs = [ObservedRun(self.hosts.run(index).path) for index in range(HOSTS)]
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Start the job."""
        base = self.hosts.base
        with ExitStack() as stack:
            for name in (*(f"host{index}" for index in range(HOSTS)), "checkpoints") if self._disks else ():
                stack.enter_context(disk(base / name))
                if name != "checkpoints":
                    stack.callback(shutil.copytree, base / name, base / f"log-{name}", ignore=NO_LOGS)
            stack.enter_context(self.hosts)
            self.hosts.start()
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """End all processes, copy the logs, and unmount the disks."""
        self._open.close()

    def inject(self, injection: Injection) -> bool:
        """Apply and undo one injection. Return False if there is no process to hit.

        Raises:
            InternalError: the job broke an invariant.
        """
        self._moved_s, self._longest_s = time.monotonic(), 0.0
        before, again = self.lost, self.again
        with ExitStack() as stack:
            stack.callback(self.hosts.net.calm)
            if not self._strike(injection, stack):
                return False
            end_s = time.monotonic() + injection.hold_s
            while (now_s := time.monotonic()) < end_s:
                if injection.kind == "flapping cable":
                    self._flap(injection.host, int((end_s - now_s) / FLAP_S) % 2 == 0)
                self.watch()
        self.settle()
        lost = self.lost - before
        self._tally.found[injection.kind].append((self._longest_s, lost))
        self._tally.started_again[injection.kind] += self.again - again
        said = f"next step after {self._longest_s:.2f} s, {lost} steps lost"
        said += f", {self.again - again} hosts started again" if self.again > again else ""
        self._tally.say(f"{self.name}, step {self.newest}: {injection}: {said}")
        return True

    def _flap(self, host: int, cut: bool) -> None:
        self.hosts.net.cut(host) if cut else self.hosts.net.mend(host)

    def _strike(self, injection: Injection, stack: ExitStack) -> bool:
        net, host, kind = self.hosts.net, injection.host, injection.kind
        if kind in STOPS or kind in KILLS:
            verb, name = kind.split()
            pid = self._pid_of(name, host)
            if not pid:
                return False
            if verb == "killed":
                os.kill(pid, signal.SIGKILL)
            else:
                stack.enter_context(stopped(pid))
        elif kind in WEATHER:
            net.weather = WEATHER[kind]
        elif kind == "packet loss":
            net.lose(LOSS)
        elif kind == "bridge":
            net.part(host, injection.other)
        elif kind.startswith("cut"):
            net.cut(host, to_it=kind != "cut from the host", from_it=kind != "cut to the host")
        elif kind in DISKS:
            place = self.hosts.base / ("checkpoints" if "checkpoint" in kind else f"host{host}")
            stack.enter_context((full if kind.startswith("full") else frozen)(place))
        return True

    def _pid_of(self, name: str, host: int) -> int:
        """Return a process of this name on this host, or on the next host that has one; 0: no host has one."""
        for index in ((host + k) % HOSTS for k in range(HOSTS)):
            if name == "rank":
                pid = next((page.pid for page in self._runs[index].workers().values()), 0)
            else:
                pid = self.hosts.run(index).serving(name)
            if pid and alive(pid):
                return pid
        return 0

    def watch(self) -> None:
        """Look at all hosts once: ends of commands, decisions, committed steps.

        Raises:
            InternalError: the job broke an invariant.
        """
        codes = {index: command.poll() for index, command in self.hosts.commands.items()}
        for index, code in codes.items():
            if code not in (None, Exit.OK, *LEFT):
                raise InternalError(f"host {index} has ended with {code}: {self.hosts.output(index)[-500:]}")
        self._gone |= {index for index, code in codes.items() if code in LEFT}
        if len(self._gone) == HOSTS and Exit.OK not in codes.values():
            raise InternalError("all hosts have left, one after the other")
        for index, run in enumerate(self._runs):
            known = len(run.events)
            run.poll()
            for event in run.events[known:]:
                self.take(index, event)
        newest = max(self.hosts.committed(index) for index in range(HOSTS))
        if newest > self.newest:
            now_s = time.monotonic()
            self.newest, self._longest_s = newest, max(self._longest_s, now_s - self._moved_s)
            self._moved_s = now_s
        if time.monotonic() - self._tally.said_s > SAID_EVERY_S:
            self._tally.say(f"{self.name}, step {self.newest}, {self.still_s():.0f} s since it was committed")
        time.sleep(POLL_S)

    def still_s(self) -> float:
        """Return the time since the newest step was committed."""
        return time.monotonic() - self._moved_s

    def take(self, index: int, event: Event) -> None:
        """Use one line of the log of a host.

        Raises:
            InternalError: the job broke an invariant.
        """
        if event.kind in ("controller_broken", "agent_broken"):
            raise InternalError(f"{event.kind} on host {index}: {event.data['error']}")
        line = str(event.data.get("line", ""))
        if not line and event.kind in ("generation_started", "resumed"):
            raise InternalError(f"{event.kind} on host {index} by a controller that is alone")
        term = int(line.partition(".")[0] or 0)
        if line in self._lines or term < max(self._term, 1):  # known, deposed, or alone
            return
        self._lines.add(line)
        self._term = term
        match event.kind:
            case "controller_started":
                self._joined, self._at_work = {}, False
            case "agent_joined":
                self._joined[event.data["node"]] = int(event.data["pid"])
            case "node_lost" | "node_left":
                self._joined.pop(event.data["node"], None)
            case "detected" | "fenced" | "resumed":
                self._at_work = event.kind == "resumed"
            case "planned" if int(event.data["step"]) < self.newest - 1:
                raise InternalError(
                    f"step {event.data['step']} was decided after step {self.newest} was committed"
                )
            case "restored":
                self.lost += int(event.data["steps_lost"])

    def settle(self) -> None:
        """Start the commands of hosts that have left again, and wait until the job is whole.

        Raises:
            InternalError: this took too long, or the job broke an invariant.
        """
        until_s, beyond = time.monotonic() + SETTLED_S_MAX, self.newest + 1
        while time.monotonic() < until_s:
            self.watch()
            for index, command in list(self.hosts.commands.items()):
                if command.poll() in LEFT:
                    self._start_again(index)
            if self.newest > beyond and self._whole():
                self._gone.clear()
                return
        raise InternalError(f"not whole within {SETTLED_S_MAX:g} s after the undoing, at step {self.newest}")

    def _start_again(self, index: int) -> None:
        self.again += 1
        self._gone.add(index)  # this end may be newer than the last look
        place = self.hosts.run(index).path
        earlier = _inode(place)
        del self.hosts.commands[index]  # otherwise the start uses another directory than that of the disk
        self.hosts.start(index)
        until_s = time.monotonic() + SETTLED_S_MAX
        while _inode(place) in (earlier, 0):  # the log there is that of the earlier start
            self.watch()
            if time.monotonic() > until_s:
                raise InternalError(f"host {index} does not start again")
        self._runs[index] = ObservedRun(place)

    def _whole(self) -> bool:
        """Return True if the job is as it was before an injection."""
        ranks: set[int] = set().union(*(run.workers() for run in self._runs))
        voters = (run.all_of("electorate")[-1:] for run in self._runs)
        hosts = [self.hosts.run(index) for index in range(HOSTS)]
        agents = {f"node{index}": host.serving("agent") for index, host in enumerate(hosts)}
        return (
            self._at_work
            and self._joined == agents
            and len(ranks) == self.ranks
            and any(host.serving("controller") for host in hosts)
            and all(host.serving("zygote") for host in hosts)
            and all(known and len(known[0].data["voters"]) == HOSTS for known in voters)
            and not any(run.all_of("no_majority") for run in self._runs)
        )

    def finish(self) -> str:
        """Let the training end without pauses, and return the digest of its weights.

        Raises:
            InternalError: ranks have different weights, or the job broke an invariant.
        """
        self.hosts.let_end()
        self._moved_s = time.monotonic()
        while any(command.poll() is None for command in self.hosts.commands.values()):
            self.watch()
            if self.still_s() > SETTLED_S_MAX:
                raise InternalError(f"no end within {SETTLED_S_MAX:g} s after step {self.newest}")
        self.watch()
        digests = {path.read_text() for path in self.hosts.base.glob("out-*")}
        if len(digests) != 1:
            raise InternalError(f"the ranks have {len(digests)} different weights")
        return digests.pop()


def _inode(place: Path) -> int:
    """Return the inode of a directory; 0: it does not exist."""
    try:
        return place.stat().st_ino
    except FileNotFoundError:
        return 0


def work(
    base: Path, seed: int, minutes: float, kinds: Sequence[str] = KINDS, layouts: Sequence[str] = tuple(LAYOUTS),
    steps: int = STEPS, injections: int | None = None,
) -> Tally:  # fmt: skip
    """Run trainings with injections until the time is over, or the given number of injections is done."""
    tally, drawn, wanted = Tally(), draw(seed, kinds), dict[str, str]()
    make_network: Callable[[int], Network] = ApartNetwork if _can(_at_time(DAY_S)) else Network
    disks = any(kind in DISKS for kind in kinds)
    tally.say(f"seed {seed}, monotonic clocks {'apart' if make_network is ApartNetwork else 'equal'}")

    def over() -> bool:
        late = time.monotonic() - tally.begun_s > 60 * minutes
        return late or bool(injections is not None and tally.injections >= injections)

    with make_network(HOSTS) as net:
        while not over():
            layout = layouts[tally.trainings % len(layouts)]
            if layout not in wanted:
                with Training(
                    net, base / f"undisturbed-{LAYOUTS[layout]}", layout, steps, tally, False
                ) as calm:
                    wanted[layout] = calm.finish()
            tally.trainings += 1
            place, current = base / f"training-{tally.trainings:03d}", ""
            try:
                with Training(net, place, layout, steps, tally, disks) as training:
                    training.settle()
                    begun = tally.injections
                    while not over() and tally.injections < begun + INJECTIONS_MAX:
                        injection = next(drawn)
                        current = injection.kind
                        tally.injections += training.inject(injection)
                        if training.newest > LAST_SHARE * steps:
                            break
                    current = ""
                    if training.finish() != wanted[layout]:
                        raise InternalError("other weights than those of the undisturbed run")
                    tally.say(
                        f"{training.name}: weights identical after {tally.injections - begun} injections"
                    )
            except InternalError as error:
                tally.failed[current] += 1
                tally.failures.append(f"{current or 'start or end'} in {place}: {error}")
                tally.say(f"FAILED: {tally.failures[-1]}")
    return tally


def _can(words: Sequence[str]) -> bool:
    return subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0


def unavailable() -> dict[str, str]:
    """Return the kinds that this machine cannot have, with the reasons."""
    found = dict(NEVER)
    with tempfile.TemporaryDirectory() as base:
        try:
            with disk(Path(base) / "disk"):
                pass
        except InternalError as error:
            found |= dict.fromkeys(DISKS, str(error))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(description="faults of network, processes and disks of three hosts")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these injections")
    parser.add_argument("--layout", choices=tuple(LAYOUTS), action="append")
    parser.add_argument("--run-dir", type=Path, default=Path("runs"))
    given = parser.parse_args(argv)
    if reason := why_not():
        print(f"no network of several hosts here: {reason}")
        return 1
    for number in ENDING:
        signal.signal(number, _leave)
    missing = unavailable()
    kinds = [kind for kind in given.kind or KINDS if kind not in missing]
    base = given.run_dir.absolute() / time.strftime("nemesis-%Y%m%d-%H%M%S")
    base.mkdir(parents=True)
    tally = work(base, given.seed, given.minutes, kinds, given.layout or tuple(LAYOUTS))
    print("\n".join(["", *tally.table(missing)]))
    for failure in tally.failures:
        print(f"FAILED: {failure}")
    took_s = time.monotonic() - tally.begun_s
    print(f"{tally.injections} injections in {tally.trainings} trainings, {took_s:.0f} s, files in {base}")
    return 1 if tally.failures else 0


def _leave(number: int, frame: FrameType | None) -> None:
    """End this process, and let no second signal interrupt the removal of processes, mounts and namespaces."""
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
