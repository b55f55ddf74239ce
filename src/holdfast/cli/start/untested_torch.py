"""The self-test of a torch that is newer than the tested versions, and its effect on the settings of a run."""

from __future__ import annotations

import os

import msgspec

from holdfast.cli.screen.escaping import echo
from holdfast.errors import FrameworkError
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.torch_build import TESTED, TRIED, VARIABLE, all_restart, torch_build, try_out


def heed_torch(settings: RunSettings) -> tuple[RunSettings, tuple[str, ...]]:
    """Return settings that work with the installed torch, and notes for the user.

    If torch is newer than the tested versions, Holdfast's self-test of it runs first. If the test fails, the settings
    restart all workers after each fault. A torch that cannot be loaded is not reported here, because the script may not
    need it.
    """
    if settings.framework != "torch" or settings.python or VARIABLE in os.environ:
        return settings, ()
    try:
        build = torch_build()
    except FrameworkError:
        return settings, ()
    if build is None or not build.is_newer:
        return settings, ()
    echo(f"holdfast: torch {build.text} is newer than the tested ones: its self-test", err=True)
    reason = try_out(build).reason
    env = {**settings.env, VARIABLE: reason or TRIED}
    if not reason:
        note = f"torch {build.text} is newer than the tested ones ({TESTED}); its self-test has passed"
        return msgspec.structs.replace(settings, env=env), (note,)
    changed = msgspec.structs.replace(settings, env=env, on_fault="restart", spares=0)
    return changed, (f"warning: {all_restart(build.text, reason)}",)
