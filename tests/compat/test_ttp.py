"""``mindio_ttp`` under a script of the Megatron chapter: any rank dies, one checkpoint is published, all ranks exit."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from holdfast import event_log
from holdfast.compat.dying_checkpoint import Faulted, Here
from holdfast.compat.endpoint import LINES, LOG_VARIABLE, TOKEN_VARIABLE, token, token_path
from holdfast.compat.rank_processor import start_controller
from holdfast.errors import AuthError, UsageError
from holdfast.runtime.net.addresses import Address
from holdfast.runtime.net.blocking_channel import BlockingChannel
from holdfast.runtime.net.service_names import TTP
from holdfast.runtime.node.spawn import free_port
from holdfast.sealing import Secret
from holdfast.store.backends.location import ROOT_VARIABLE
from holdfast.store.manage.checkpoint_root import Root
from tests.cli.command import clean_environment
from tests.ranks import statuses
from tests.runtime.runs import exists, until
from tests.session.launch import run_torchrun

pytestmark = [pytest.mark.processes, pytest.mark.torch]

HERE = Path(__file__).parent
BOUND_S = 60
WORLD = 4
STEPS = 30


@pytest.fixture(autouse=True)
def _log_in_the_test_s_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Move the log, which is in the working directory by default, to the folder of the test."""
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "ttp.jsonl"))


def run(folder: Path, fault: str = "", world: int = WORLD) -> tuple[list[int], list[event_log.Event]]:
    """Run the script until the ranks and the controller end.

    Return the ranks' exit statuses and the controller's log.
    """
    log = folder / f"ttp-{len(list(folder.glob('ttp-*')))}.jsonl"
    command = [str(HERE / "train.py"), str(STEPS), str(free_port()), str(folder), *([fault] if fault else [])]
    own = {LOG_VARIABLE: str(log), ROOT_VARIABLE: str(folder / "ckpts")}
    env = clean_environment({**own, "GLOO_SOCKET_IFNAME": "lo"})
    codes = statuses(world, *command, env=env)

    def gone() -> bool:
        return any(event.kind == "gone" for event in event_log.read(log).events)

    until("the controller ends", gone, 10)
    return codes, list(event_log.read(log).events)


def final(folder: Path) -> set[bytes]:
    """Return the final weights of all ranks."""
    return {np.load(path).tobytes() for path in folder.glob("final-*.npy")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    codes, events = run(folder)
    assert codes == [0] * WORLD and not [e for e in events if e.kind in ("fault", "plan")]
    weights = final(folder)
    assert len(weights) == 1
    return weights


def test_rank_0_dies_and_the_next_start_ends_the_same(tmp_path: Path, undisturbed: set[bytes]) -> None:
    codes, events = run(tmp_path, "0@17:kill")
    assert codes == [-9, 1, 1, 1]
    plan = next(e for e in events if e.kind == "plan")
    assert plan.data == {"step": 17, "writers": [1, 2]}, "one holder of each of the two parts"
    assert sorted(os.listdir(tmp_path / "step_17")) == ["rank_1.npz", "rank_2.npz"]
    assert not list(tmp_path.glob("*_tmp"))
    assert run(tmp_path)[0] == [0] * WORLD
    assert final(tmp_path) == undisturbed


def test_the_chapter_s_own_handlers_save_once_for_all_parts(
    tmp_path: Path, undisturbed: set[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handlers pass half of the number of ranks as the number of parts, even if each rank holds everything."""
    monkeypatch.setenv("CHAPTER", "1")
    codes, events = run(tmp_path, "0@17:kill")
    assert codes == [-9, 1, 1, 1]
    assert next(e for e in events if e.kind == "plan").data == {"step": 17, "writers": [1, 2]}
    (saved,) = Root(tmp_path / "ckpts").list()
    assert saved.valid and saved.step == 17
    assert run(tmp_path)[0] == [0] * WORLD
    assert final(tmp_path) == undisturbed


@pytest.mark.parametrize(
    ("how", "chapter", "wait_s"),
    [
        pytest.param("given", True, "0.3", id="the chapter's handlers", marks=pytest.mark.more),
        pytest.param("given", False, "0.3", id="handlers of its own, in two parts"),
        pytest.param("between", True, "0.3", id="killed between the calls", marks=pytest.mark.more),
    ],
)
def test_a_death_between_the_two_calls_seals_the_step_under_its_own_number(
    tmp_path: Path,
    undisturbed: set[bytes],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    chapter: bool,
    wait_s: str,
) -> None:
    """The weights are already those of step 18. The schedule and the arguments are still those of step 17."""
    monkeypatch.setenv("BETWEEN_S", wait_s)
    if chapter:
        monkeypatch.setenv("CHAPTER", "1")
    codes, events = run(tmp_path, f"0@17:{how}")
    assert codes == [-9, 1, 1, 1]
    assert {e.data["step"] for e in events if e.kind in ("plan", "saved", "end")} == {18}
    assert next(e for e in events if e.kind == "end").data["saved"]
    assert run(tmp_path)[0] == [0] * WORLD
    assert final(tmp_path) == undisturbed


@pytest.mark.more
def test_ranks_that_never_come_to_the_second_call_are_no_source(
    tmp_path: Path, undisturbed: set[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """These ranks wait for the dead rank between the calls.

    Their weights are of step 18, their schedule is of step 17.
    """
    monkeypatch.setenv("BETWEEN_S", "ever")
    monkeypatch.setenv("CHAPTER", "1")
    codes, events = run(tmp_path, "0@17:given")
    assert codes == [-9, 1, 1, 1]
    assert {e.data["why"] for e in events if e.kind == "stands"} == {
        "ttp_set_ckpt_args was not called since its last update"
    }
    assert not list((tmp_path / "ckpts").glob("step-*"))
    assert run(tmp_path)[0] == [0] * WORLD
    assert final(tmp_path) == undisturbed


@pytest.mark.more
def test_arguments_may_be_given_inside_the_update(
    tmp_path: Path, undisturbed: set[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARGS_FIRST", "1")
    codes, events = run(tmp_path, "0@17:kill")
    assert codes == [-9, 1, 1, 1]
    assert next(e for e in events if e.kind == "plan").data["step"] == 17


def test_a_rank_in_the_middle_of_its_update_is_no_source(tmp_path: Path) -> None:
    codes, events = run(tmp_path, "0@9:torn", world=2)
    assert codes == [1, 1]
    torn = next(e for e in events if e.kind == "stands" and e.data["rank"] == 0)
    assert torn.data["why"] == "its update was not completed"
    assert next(e for e in events if e.kind == "plan").data["writers"] == [1]


@pytest.mark.more
def test_torchrun_asks_the_others_to_leave_while_they_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"GLOO_SOCKET_IFNAME": "lo", "SAVE_TAKES_S": "2"}.items():
        monkeypatch.setenv(name, value)
    script = [str(HERE / "train.py"), str(STEPS), str(free_port()), str(tmp_path), "0@17:kill"]
    done = run_torchrun(tmp_path, 2, *script)
    assert "rank 1 leaves after the dying checkpoint" in done.stdout, "SIGTERM came while it wrote"
    assert np.load(tmp_path / "step_17" / "rank_1.npz")["step"] == 17


@pytest.mark.more
def test_writers_that_are_asked_to_leave_end_by_that_signal_when_they_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASKED_IN_SAVE", "1")
    monkeypatch.setenv("SAVE_TAKES_S", "0.5")
    codes, events = run(tmp_path, "0@17:kill")
    assert codes == [-9, -15, -15, 1]
    assert next(e for e in events if e.kind == "end").data["saved"]
    assert sorted(os.listdir(tmp_path / "step_17")) == ["rank_1.npz", "rank_2.npz"]


def test_a_rank_that_is_asked_to_leave_leaves_a_checkpoint(tmp_path: Path, undisturbed: set[bytes]) -> None:
    codes, events = run(tmp_path, "1@17:term")
    assert codes == [1, -15, 1, 1]
    fault = next(e for e in events if e.kind == "fault")
    assert fault.data == {"rank": 1, "what": "it was asked to leave: SIGTERM", "lost": False}
    assert next(e for e in events if e.kind == "end").data["saved"]
    assert run(tmp_path)[0] == [0] * WORLD
    assert final(tmp_path) == undisturbed


def test_a_rank_whose_training_ends_while_it_writes_writes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank is killed in the last step, when the others no longer need its part of that step."""
    monkeypatch.setenv("SAVE_TAKES_S", "1")
    codes, _ = run(tmp_path, f"0@{STEPS - 1}:late")
    assert codes == [-9, 1, 1, 1]
    assert sorted(os.listdir(tmp_path / f"step_{STEPS}")) == ["rank_1.npz", "rank_2.npz"]


def test_an_address_that_others_reach_needs_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="without a secret"):
        start_controller("10.0.0.1", 29999, 2)
    secret = tmp_path / "token"
    secret.write_text(text := secrets.token_hex(32))
    monkeypatch.setenv(TOKEN_VARIABLE, str(secret))
    with pytest.raises(AuthError, match="can be read by others"):
        token("10.0.0.1", 29999)
    secret.chmod(0o600)
    assert token("10.0.0.1", 29999) == text.encode()


def test_a_host_may_be_given_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, path = free_port(), tmp_path / "log.jsonl"
    monkeypatch.setenv(LOG_VARIABLE, str(path))
    pid = start_controller("localhost", port, 1)
    try:
        until("it listens", lambda: event_log.read(path).events)
        rank = BlockingChannel.connect(
            LINES, Address("localhost", port), Secret(token("localhost", port)), TTP, "worker"
        )
        rank.close()
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        token_path("localhost", port).unlink(missing_ok=True)
    for unknown in ("no.such.host.invalid", "", "x" * 99):
        with pytest.raises(UsageError, match="TTP controller is unknown") as caught:
            start_controller(unknown, port, 1)
        assert "getent" in caught.value.hint


def listening_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> tuple[int, int, Path]:
    """Start a controller for ``ranks`` ranks. Return its port, its process and its log."""
    port, path = free_port(), tmp_path / "log.jsonl"
    monkeypatch.setenv(LOG_VARIABLE, str(path))
    pid = start_controller("127.0.0.1", port, ranks)
    until("it listens", lambda: path.exists() and event_log.read(path).events)
    return port, pid, path


def test_a_stranger_is_not_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, pid, path = listening_controller(tmp_path, monkeypatch, 1)
    try:
        with pytest.raises(AuthError):
            BlockingChannel.connect(LINES, Address("127.0.0.1", port), Secret(b"y" * 64), TTP, "worker")
        honest = BlockingChannel.connect(
            LINES, Address("127.0.0.1", port), Secret(token("127.0.0.1", port)), TTP, "worker"
        )
        honest.send(Here(rank=0, world_size=1, pid=1))
        until("it is heard", lambda: [e for e in event_log.read(path).events if e.kind == "here"])
        honest.close()
        until(
            "it ends with its last rank", lambda: [e for e in event_log.read(path).events if e.kind == "gone"]
        )
        until("its secret is gone", lambda: not token_path("127.0.0.1", port).exists())
    finally:
        if exists(pid):
            os.kill(pid, 9)
        os.waitpid(pid, 0)


STOPPED = """
import os, signal, sys
from holdfast.compat import framework_ttp as ttp
if sys.argv[2:]:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
ttp.ttp_init_processor(0, [0, 1], 2, 2, 1)
ttp.ttp_start_processor("127.0.0.1", int(sys.argv[1]))
while True:
    ttp.ttp_start_updating_os(-1)
    ttp.ttp_end_updating_os(1)
"""


def test_a_stopped_rank_leaves_when_the_controller_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, pid, path = listening_controller(tmp_path, monkeypatch, 2)
    rank = subprocess.Popen([sys.executable, "-c", STOPPED, str(port)], stderr=subprocess.PIPE, text=True)
    other = BlockingChannel.connect(
        LINES, Address("127.0.0.1", port), Secret(token("127.0.0.1", port)), TTP, "worker"
    )
    try:
        other.send(Here(rank=1, world_size=2, pid=1))
        until("both are here", lambda: len([e for e in event_log.read(path).events if e.kind == "here"]) == 2)
        other.send(Faulted(rank=1, what="it failed, and does not answer"))
        until("rank 0 stands", lambda: [e for e in event_log.read(path).events if e.kind == "stands"])
        os.kill(pid, 9)
        assert rank.wait(BOUND_S) == 1
        assert rank.stderr is not None and "the TTP controller is lost" in rank.stderr.read()
    finally:
        rank.kill()
        rank.communicate()
        other.close()
        os.waitpid(pid, 0)
        token_path("127.0.0.1", port).unlink(missing_ok=True)


@pytest.mark.parametrize(("own", "code"), [([], -signal.SIGTERM), (["a handler of its own"], 5)])
def test_sigterm_is_held_off_by_nobody_without_a_controller_or_where_the_script_handles_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: list[str], code: int
) -> None:
    port, pid, path = listening_controller(tmp_path, monkeypatch, 2)
    command = [sys.executable, "-c", STOPPED, str(port), *own]
    rank = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        until("it is here", lambda: [e for e in event_log.read(path).events if e.kind == "here"])
        if not own:
            os.kill(pid, 9)
            assert rank.stderr is not None and "the TTP controller is lost" in rank.stderr.readline()
        rank.terminate()
        assert rank.wait(BOUND_S) == code
    finally:
        rank.kill()
        rank.communicate()
        if own:
            os.kill(pid, 9)
        os.waitpid(pid, 0)
        token_path("127.0.0.1", port).unlink(missing_ok=True)


EARLY = """
import os, signal, sys, time
from holdfast.compat import framework_ttp as ttp
from holdfast.session.exit_requests import ExitWatch
start = ExitWatch.start
def started(watch):
    start(watch)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
ExitWatch.start = started
ttp.ttp_init_processor(0, [0, 1], 2, 2, 1)
ttp.ttp_start_processor("127.0.0.1", int(sys.argv[1]))
while True:
    time.sleep(1)
"""


def test_a_sigterm_that_comes_while_the_processor_starts_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, pid, _ = listening_controller(tmp_path, monkeypatch, 2)
    rank = subprocess.Popen([sys.executable, "-c", EARLY, str(port)], stderr=subprocess.PIPE, text=True)
    try:
        assert rank.stderr is not None
        assert "leaves after the dying checkpoint" in rank.stderr.readline()
        os.kill(pid, 9)
        assert rank.wait(BOUND_S) == -signal.SIGTERM
    finally:
        rank.kill()
        rank.communicate()
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        token_path("127.0.0.1", port).unlink(missing_ok=True)


def test_a_log_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "none" / "log.jsonl"))
    with pytest.raises(UsageError, match="cannot write the log"):
        start_controller("127.0.0.1", free_port(), 2)


def test_a_script_that_exits_well_is_no_fault() -> None:
    from holdfast.compat import framework_ttp as ttp

    @ttp.ttp_to_persist
    def train() -> None:
        raise SystemExit(0)

    with pytest.raises(SystemExit):
        train()


def test_a_controller_that_dies_is_told_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from holdfast.compat import framework_ttp as ttp

    port = free_port()
    os.environ[LOG_VARIABLE] = str(tmp_path / "log.jsonl")
    try:
        ttp.ttp_init_controller(0, 2, 1)
        ttp.ttp_start_controller("127.0.0.1", port)
        ttp.ttp_init_processor(0, [0, 1], 2, 2, 1)
        ttp.ttp_start_processor("127.0.0.1", port)
        pid = until("it listens", lambda: [
            e for e in event_log.read(tmp_path / "log.jsonl").events if e.kind == "here"])[0].data["pid"]  # fmt: skip
        assert pid == os.getpid()
        listed = subprocess.run(
            ["pgrep", "-f", f"controllerd 127.0.0.1 {port}"], capture_output=True, text=True
        )
        controller = int(listed.stdout)
        os.kill(controller, 9)
        until("it is gone", lambda: not exists(controller))
        ttp.ttp_start_updating_os(-1)
        ttp.ttp_end_updating_os(1)
        ttp.tft_report_error(ttp.ReportState.RS_UNKNOWN.value)
        assert "no dying checkpoint from now on" in caplog.text
    finally:
        ttp.tft_destroy_processor()
        del os.environ[LOG_VARIABLE]
        token_path("127.0.0.1", port).unlink(missing_ok=True)
