"""What the nemesis (``tests/soak/nemesis.py``) can do, drawn from a seed, and the table of what it did."""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

HOSTS = 3
HOLDS_S = ((0.5, 1.5), (3.0, 6.0), (9.0, 13.0))
NETWORK = (
    *("cut both ways", "cut to the host", "cut from the host", "bridge", "flapping cable"),
    *("packet loss", "delayed frames", "repeated frames", "overtaken frames"),
)
STOPS = ("stopped agent", "stopped controller", "stopped zygote")
KILLS = ("killed agent", "killed controller", "killed zygote", "killed rank")
DISKS = ("full run directory", "full checkpoint directory", "run directory stands still")
KINDS = (*NETWORK, *STOPS, *KILLS, *DISKS)
NEVER = {
    "clock that jumps": "a time namespace is set at its creation only; libfaketime breaks time.sleep",
    "slow disk": "no file system with delays here; see the one that stands still",
}
"""Wanted kinds that this machine cannot have, with the reasons."""


@dataclass(frozen=True)
class Injection:
    """One fault to apply.

    ``other``: another host, the far end of the cable of a bridge. ``hold_s``: the time until the undoing; 0: there is
    nothing to undo.
    """

    kind: str
    host: int
    other: int
    hold_s: float

    def __str__(self) -> str:
        """Return one part of a line for a person."""
        far = f" and {self.other}" if self.kind == "bridge" else ""
        return f"{self.kind}, host {self.host}{far}" + (f", {self.hold_s:.1f} s" if self.hold_s else "")


def draw(seed: int, kinds: Sequence[str]) -> Iterator[Injection]:
    """Yield injections without end: every kind once in a random order, then every kind again in another order.

    Example:
        >>> next(draw(1, ["bridge"])).kind
        'bridge'
    """
    random_ = random.Random(seed)
    while True:
        for kind in random_.sample(kinds, len(kinds)):
            host, other = random_.sample(range(HOSTS), 2)
            held_s = random_.uniform(*random_.choice(HOLDS_S))
            yield Injection(kind, host, other, 0.0 if kind in KILLS else round(held_s, 1))


@dataclass
class Tally:
    """What was injected, and what followed. ``found``: seconds to the next committed step and steps lost, by kind."""

    found: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    started_again: dict[str, int] = field(
        default_factory=lambda: defaultdict(int)
    )  # commands of hosts that left
    failed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    failures: list[str] = field(default_factory=list)
    trainings: int = 0
    injections: int = 0
    begun_s: float = field(default_factory=time.monotonic)
    said_s: float = 0.0

    def say(self, text: str) -> None:
        """Print one line with the time since the start."""
        self.said_s = time.monotonic()
        print(f"{self.said_s - self.begun_s:6.0f} s  {text}", flush=True)

    def table(self, missing: Mapping[str, str]) -> list[str]:
        """Return the lines of the table in Markdown. ``missing``: kinds that were not possible, with the reasons."""
        lines = [
            "| injection | times | steps lost | median s | worst s | outcome |",
            "|---|---|---|---|---|---|",
        ]
        for kind in (*KINDS, *NEVER):
            if kind in missing:
                lines.append(f"| {kind} | 0 | - | - | - | not available here: {missing[kind]} |")
                continue
            found = self.found[kind]
            pauses_s = [pause_s for pause_s, _ in found]
            times = f"{statistics.median(pauses_s):.2f} | {max(pauses_s):.2f}" if found else "- | -"
            again, failed = self.started_again[kind], self.failed[kind]
            outcome = f"**failed {failed} times**" if failed else "continued" if found else "not drawn"
            outcome += f", {again} times a host was started again" if again else ""
            lost = sum(steps for _, steps in found)
            lines.append(f"| {kind} | {len(found) + failed} | {lost} | {times} | {outcome} |")
        return lines
