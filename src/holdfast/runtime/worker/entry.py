"""The entry of a worker after fork or exec. It sets up the client, status page and process groups, and runs the script.

All inputs are in the environment and in ``run.json``. The script runs as ``__main__``. The exit code of the worker is
the exit code of the script, or one of these:

- 1 after an uncaught exception; 3 after a typed UserError or StoreError;
- 78 (RESTART) if the script failed while its job was fenced;
- 77 (ORPHANED) if the worker could not join the other ranks because launcher and agent are lost.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Literal, cast

from holdfast.core.ids import Generation, MemberId
from holdfast.core.protocol.health_messages import ShowRecords
from holdfast.core.protocol.status_page import Phase, Word
from holdfast.errors import GroupError, ScriptError
from holdfast.exit_codes import Exit
from holdfast.runtime.net.multiprocessing_sockets import use_sockets_of
from holdfast.runtime.node import env_record
from holdfast.runtime.node.death_watch import hold
from holdfast.runtime.node.deferred_rank import exempt, use
from holdfast.runtime.node.framework_registry import install_framework, records
from holdfast.runtime.node.hang_evidence import offer_records, offer_stacks, records_path
from holdfast.runtime.node.line_output import by_line
from holdfast.runtime.node.process_title import set_title
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir, environment_path, open_log
from holdfast.runtime.node.stack_texts import stacks_path
from holdfast.runtime.node.status_page import Page
from holdfast.runtime.worker.script_end import leaves_sessions
from holdfast.runtime.worker.user_exception import exit_code, follows, show, show_following, tell
from holdfast.runtime.worker.worker_client import JobSaves, WorkerClient

LEFT_CODES = frozenset({Exit.REQUEUE, Exit.UNSAVED, Exit.ORPHANED})
"""Exit codes of a script whose session was left by all ranks, or has lost launcher and agent."""
_OWN_FRAMES = (__file__, runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>")


def client_from_env(orphan_s: float) -> WorkerClient:
    """Return the client that the ``HOLDFAST_*`` and torchrun variables describe. The caller starts it."""
    env = os.environ
    page = Page.open(env["HOLDFAST_PAGE"])
    page[Word.PID] = os.getpid()
    return WorkerClient(
        member_id=MemberId(int(env["HOLDFAST_MEMBER_ID"])),
        generation=Generation.parse(env["HOLDFAST_GENERATION"]),
        rank=int(env["RANK"]),
        local_rank=int(env["LOCAL_RANK"]),
        world_size=int(env["WORLD_SIZE"]),
        local_world_size=int(env["LOCAL_WORLD_SIZE"]),
        page=page,
        run_dir=Path(env["HOLDFAST_RUN_DIR"]),
        saves=JobSaves(env["HOLDFAST_JOB_ROOT"], env["HOLDFAST_RESUME"]),
        joining=bool(env["HOLDFAST_JOIN"]),
        spare=cast(Literal["", "any", "fixed"], env["HOLDFAST_SPARE"]),
        orphan_s=orphan_s,
    )


def redirect(log: str) -> None:
    """Start a new process session with an empty stdin, and redirect stdout and stderr into the file ``log``."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    write_to(log)


def write_to(log: str) -> None:
    """Redirect stdout and stderr of this process into the file ``log``."""
    path = Path(log)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    out = open_log(path)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)


def take_over(client: WorkerClient, log: str, settings: RunSettings) -> None:
    """Redirect the output and the stacks of this process, a spare that became a member, to the files of its rank."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    write_to(log)
    with exempt():  # the environment already has the member's rank
        _record_start(client)
    _set_title(settings, client.rank)
    offer_stacks(stacks_path(RunDir(os.environ["HOLDFAST_RUN_DIR"]), client.member_id), client.page)


def run_script(settings: RunSettings) -> None:
    """Run the user's code as ``python`` would, with ``__main__``, ``sys.argv`` and ``sys.path[0]``.

    Raises:
        ScriptError: there is no such script or module.
    """
    if settings.kind == "module":
        _set_path("")
        sys.argv = settings.argv
        try:
            found = importlib.util.find_spec(settings.target)
        except ImportError as error:
            raise ScriptError(
                f"cannot find the module {settings.target}: {error}", hint="check the name after -m"
            ) from error
        if found is None:
            raise ScriptError(f"no module named {settings.target}", hint="check the name after -m")
        runpy.run_module(settings.target, run_name="__main__", alter_sys=True)
        return
    path = Path(settings.target)
    sys.argv = settings.argv
    if path.is_dir():
        runpy.run_path(settings.target, run_name="__main__")
        return
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ScriptError(
            f"cannot read the training script {settings.target}: {error.strerror}",
            hint="check the path; it is relative to the directory where the run was started",
        ) from error
    _set_path(str(path.resolve().parent))
    module = types.ModuleType("__main__")
    module.__file__ = settings.target
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    exec(compile(source, settings.target, "exec"), module.__dict__)


def main() -> int:
    """Run the worker that the environment describes, and return its exit code."""
    by_line()
    settings = RunSettings.load(Path(os.environ["HOLDFAST_RUN_DIR"]))
    client = client_from_env(settings.orphan_s)
    client.on_called(lambda log: take_over(client, log, settings))
    _set_title(settings, None if client.stand_in else client.rank)
    if client.stand_in is not None:
        use(client.stand_in)
    hold(client.page.path)
    use_sockets_of(client.page.path.parent)
    run = RunDir(os.environ["HOLDFAST_RUN_DIR"])
    client.on(
        ShowRecords,
        lambda order: offer_records(records_path(run, order.member_id), lambda: records(settings.framework)),
    )
    client.start()
    offer_stacks(stacks_path(run, client.member_id), client.page)
    try:
        if client.stand_in is None:
            _record_start(client)
        install_framework(settings.framework)
        with leaves_sessions():
            run_script(settings)
    except SystemExit as error:
        show(error)
        code = exit_code(error)
        if code != Exit.OK and not (code in LEFT_CODES and client.page.state()[1] is Phase.FINISHED):
            # A script that exits on its own (for a wrong argument) will do so again. Report it like an exception.
            tell(client, error, f"exit code {code}")
    except BaseException as error:
        code = _report(client, error)
    else:
        code = Exit.OK
    if code == Exit.OK:
        client.page.place(client.page.state()[0], Phase.LEFT)
    client.close()
    return code


def _record_start(client: WorkerClient) -> None:
    path = environment_path(os.environ["TORCHELASTIC_ERROR_FILE"])
    try:
        env_record.record(path, client.rank, client.member_id)
    except OSError as error:
        sys.stderr.write(f"holdfast: cannot write {path}: {error.strerror}\n")


def _set_title(settings: RunSettings, rank: int | None) -> None:
    set_title(settings.typed or settings.target, rank, settings.args)


def _set_path(first: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = first


def _report(client: WorkerClient, error: BaseException) -> int:
    """Write an exception to the log and the error file, and report it to the controller. Return the exit code."""
    tail = error.__traceback__
    while tail is not None and tail.tb_frame.f_code.co_filename in _OWN_FRAMES:
        tail = tail.tb_next
    error.__traceback__ = tail
    if client.failed is not error and follows(client, error):
        show_following(client, error)
        return int(Exit.RESTART)
    show(error)
    if client.orphaned and isinstance(error, GroupError):
        return int(Exit.ORPHANED)
    if client.fenced and client.failed is not error:
        return int(Exit.RESTART)
    return int(Exit.BAD_INPUT if tell(client, error) else Exit.FAILED)


if __name__ == "__main__":
    sys.exit(main())
