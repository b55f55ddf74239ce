"""``holdfast submit`` with a fake command of the scheduler."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.cli.command import HOLDFAST, clean_environment


def submitted(
    place: Path, kind: str, args: tuple[str, ...], tool: str, script: str | None, env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run ``holdfast submit KIND`` in ``place``.

    Args:
        place: an empty directory.
        kind: ``slurm`` or ``k8s``.
        args: of the command.
        tool: name of the scheduler's command.
        script: the fake of this command on PATH; None: there is no such command.
        env: of the command, in addition to that of this process.
    """
    binaries = place / "bin"
    binaries.mkdir(exist_ok=True)
    if script is not None:
        (binaries / tool).write_text(script)
        (binaries / tool).chmod(0o755)
    path = f"{binaries}:/usr/bin:/bin" if script is not None else str(binaries)
    return subprocess.run(
        [HOLDFAST, "submit", kind, *args],
        cwd=place, env=clean_environment({"PATH": path, **env}),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
