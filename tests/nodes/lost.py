"""The time from the loss of a node to the next step with all ranks: ``python -m tests.nodes.lost [--rounds 5]`` (root).

Three hosts are network namespaces, with ``--nnodes 2:3`` and a small DDP model. The third host is a spare. In turns,
all processes of a node are killed, or its cable is cut in both directions; and the node is the controller's or another
one. The time starts before the first kill or the cut. It ends when the log shows that all ranks have committed a step
(``recovered``). No step may be lost.

It prints markdown: seconds as minimum, median and maximum.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

from holdfast.errors import InternalError
from tests.nodes.cables import Network
from tests.nodes.jobs import TRAIN, Hosts

KINDS = ("all processes of a node", "a cable, cut both ways")
PLACES = ("", ", the controller runs there")
STEPS, PAUSE_S = "4000", "0.05"


def controller(hosts: Hosts) -> int:
    """Return the host that runs the controller."""
    return next(index for index in (0, 1, 2) if hosts.events(index, "elected"))


def measure(net: Network, base: Path, strike: Callable[[Hosts, int], None], at_controller: bool) -> float:
    """Lose one host, and return the seconds until the job has recovered.

    Raises:
        InternalError: steps were lost.
    """
    with Hosts(net, base, "2:3", TRAIN, (STEPS, PAUSE_S, str(base / "out")), torch=True) as hosts:
        hosts.start()
        for index in (0, 1):
            hosts.wait_step(index, 5)
        leader = controller(hosts)
        lost = leader if at_controller else int(leader == 0)
        begun_s = time.time()
        strike(hosts, lost)
        event = hosts.wait_event(1 - lost, "recovered")
        net.mend(lost)
    if event.data["steps_lost"]:
        raise InternalError(f"{event.data['steps_lost']} steps lost: {base}")
    return event.t_wall - begun_s


def main() -> None:
    """Measure all kinds of losses, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    strikes: tuple[Callable[[Hosts, int], None], ...] = (
        Hosts.kill,
        lambda hosts, lost: hosts.net.cut(lost),
    )
    found: dict[tuple[int, int], list[float]] = {case: [] for case in product((0, 1), (0, 1))}
    with tempfile.TemporaryDirectory() as base, Network(3) as net:
        for number in range(rounds):
            for kind, there in found:
                place = Path(base) / f"{number}-{kind}-{there}"
                found[kind, there].append(measure(net, place, strikes[kind], bool(there)))
                print(
                    f"round {number + 1} of {rounds}: {KINDS[kind]}{PLACES[there]}: {found[kind, there][-1]:.2f} s"
                )
    print("\n| lost, a spare waits | min | median | max |\n|---|---|---|---|")
    for (kind, there), seconds in found.items():
        cells = (min(seconds), statistics.median(seconds), max(seconds))
        print(f"| {KINDS[kind]}{PLACES[there]} | {' | '.join(f'{each:.2f}' for each in cells)} |")


if __name__ == "__main__":
    main()
