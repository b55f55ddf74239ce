"""Time that a user waits before anything happens: ``holdfast --help`` and ``import holdfast``.

python bench/startup.py [--rounds 20]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import holdfast": ["-c", "import holdfast"],
    "holdfast --help": ["-m", "holdfast", "--help"],
    "holdfast run --help": ["-m", "holdfast", "run", "--help"],
    "import torch": ["-c", "import torch"],
}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    print("| whole process, ms | n | min | median | max |\n|---|---|---|---|---|")
    for name, command in COMMANDS.items():
        times = []
        for _ in range(rounds if name != "import torch" else 5):
            start_s = time.perf_counter()
            subprocess.run([sys.executable, *command], check=True, capture_output=True)
            times.append((time.perf_counter() - start_s) * 1e3)
        print(
            f"| {name} | {len(times)} | {min(times):.0f} | {statistics.median(times):.0f} | {max(times):.0f} |"
        )


if __name__ == "__main__":
    main()
