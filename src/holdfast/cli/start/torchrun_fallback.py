"""The start of torchrun in place of ``holdfast run``, while the variable ``HOLDFAST_DISABLE`` is set."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from holdfast.cli.screen.error_output import say
from holdfast.cli.start.flag_files import FlagValues
from holdfast.cli.start.flags import FLAGS
from holdfast.errors import UsageError
from holdfast.runtime.node.disabled import DISABLE_VARIABLE


def torchrun_command(settled: FlagValues, script: str, args: Sequence[str]) -> list[str]:
    """Return the command line of torchrun for this script, with the flags that torchrun also has.

    Raises:
        UsageError: the script is not for PyTorch.
    """
    framework = settled.values["framework"]
    if framework != "torch":
        raise UsageError(
            f"{DISABLE_VARIABLE} is set: without Holdfast a {framework} script has no launcher",
            hint=f"unset {DISABLE_VARIABLE}, or start the script without holdfast run",
        )
    flags = []
    for flag in FLAGS:
        if flag.ours or flag.key not in settled.given:
            continue
        value = settled.values[flag.key]
        if flag.kind != "switch":
            flags.append(f"{flag.name}={value}")
        elif value:
            flags.append(flag.name)
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    return [python, "-m", "torch.distributed.run", *flags, script, *args]


def give_way(settled: FlagValues, script: str, args: Sequence[str]) -> NoReturn:
    """Print a message, and replace this process by torchrun (exec).

    Raises:
        UsageError: torchrun cannot be started.
    """
    command = torchrun_command(settled, script, args)
    own = ", ".join(
        flag.name for flag in FLAGS if flag.ours and flag.key in settled.given and flag.key != "framework"
    )
    without = f"; {own} have no effect" if own else ""
    say(f"holdfast: {DISABLE_VARIABLE} is set: torchrun runs the script, and no fault is survived{without}")
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(command[0], command)
    except OSError as error:
        raise UsageError(f"cannot start {command[0]}: {error.strerror}", hint="check PYTHON_EXEC") from error
