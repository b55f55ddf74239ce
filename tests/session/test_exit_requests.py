"""Requests to exit: no obstacle ends the thread that watches for them."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from holdfast.runtime.node.run_processes import processes
from holdfast.runtime.node.rundir import RunDir
from holdfast.session.exit_requests import FILE_SIZE_BYTES_MAX, ExitWatch
from holdfast.store.manage.checkpoint_root import Root
from tests.runtime.runs import until
from tests.session.test_jobs import BIN


class Watched:
    """A watch over this process, and the requests that it received."""

    def __init__(self, exit_file: Path | None = None) -> None:
        self.asked: list[str] = []
        self.watch = ExitWatch(self.asked.append, exit_file, None, lambda: None)


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """Yield a full pipe to which the interpreter writes signals, as other code set it up and never reads it."""
    read, write = os.pipe2(os.O_NONBLOCK)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(write, bytes(4096))
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGUSR2)}
    yield write
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(before)
    os.close(read)
    os.close(write)


def test_a_wake_up_pipe_of_others_that_is_full_hides_no_signal(full_pipe: int) -> None:
    here = Watched()
    here.watch.start()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        until("reported", lambda: here.asked == ["SIGTERM"])
        os.kill(os.getpid(), signal.SIGUSR2)
        until("reported again", lambda: here.asked == ["SIGTERM", "SIGUSR2"])
    finally:
        here.watch.stop()
    assert signal.set_wakeup_fd(full_pipe) == full_pipe


@pytest.mark.parametrize(("launched", "after"), [(True, signal.SIG_IGN), (False, signal.SIG_DFL)])
def test_a_warning_after_the_session_ends_no_worker_of_a_run(
    monkeypatch: pytest.MonkeyPatch, launched: bool, after: signal.Handlers
) -> None:
    if launched:
        monkeypatch.setenv("HOLDFAST_MEMBER_ID", "1")
    else:
        monkeypatch.delenv("HOLDFAST_MEMBER_ID", raising=False)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    try:
        here = Watched()
        here.watch.start()
        here.watch.stop()
        assert [signal.getsignal(number) for number in before] == [after, after]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_script_with_many_open_files_is_heard() -> None:
    """There are more open files than select() can watch."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    here = Watched()
    here.watch.start()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        until("reported", lambda: here.asked == ["SIGTERM"])
    finally:
        here.watch.stop()
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_exit_file_that_cannot_be_read_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "exit.json"
    path.symlink_to(path)
    here = Watched(path)
    here.watch.start()
    try:
        until("warned", lambda: caplog.records)
        (tmp_path / "new").write_text('{"GracefulExit": 1}')
        (tmp_path / "new").replace(path)  # replaced at once: a half-written file would give a second warning
        until("asked", lambda: here.asked)
    finally:
        here.watch.stop()
    assert here.asked == [f"file {path}"]
    assert len(caplog.records) == 1 and "cannot read the exit file" in caplog.text


@pytest.mark.parametrize("content", [b"[" * 60_000, b"9" * 60_000, b"\xff", b'{"GracefulExit"'])
def test_nonsense_in_the_exit_file_leaves_the_other_ways_to_ask(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    """Regression: deeply nested JSON ended the thread that watches signals."""
    path = tmp_path / "exit.json"
    here = Watched(path)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    here.watch.start()
    try:
        path.write_bytes(content)
        until("warned", lambda: "is not JSON" in caplog.text)
        os.kill(os.getpid(), signal.SIGTERM)
        until("asked by signal", lambda: here.asked == ["SIGTERM"])
        path.write_text('{"GracefulExit": 1}')
        until("asked by the file", lambda: here.asked == ["SIGTERM", f"file {path}"])
    finally:
        here.watch.stop()
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("kind", ["pipe", "large"])
def test_an_exit_file_that_is_none_does_not_hold_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    path = tmp_path / "exit.json"
    os.mkfifo(path) if kind == "pipe" else path.write_bytes(bytes(FILE_SIZE_BYTES_MAX + 1))
    here = Watched(path)
    here.watch.start()
    here.watch.stop()
    assert not here.asked and "cannot read the exit file" in caplog.text


Child = tuple[multiprocessing.process.BaseProcess, Connection]


def _echo(line: Connection) -> None:
    while True:
        line.send(line.recv())


@pytest.fixture
def watched() -> Iterator[Watched]:
    here = Watched()
    here.watch.start()
    yield here
    here.watch.stop()


@pytest.fixture
def child(watched: Watched) -> Iterator[Child]:
    """Yield a process that was forked under a watch, as by a data loader or a pool. It sends its signals back."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_echo, args=(theirs,))
    process.start()
    ours.send("begun")
    assert ours.recv() == "begun"
    yield process, ours
    process.kill()
    process.join()


def test_a_forked_process_that_is_terminated_ends_and_asks_nobody(watched: Watched, child: Child) -> None:
    process, _ = child
    process.terminate()
    process.join(60)
    assert process.exitcode == -signal.SIGTERM
    os.kill(os.getpid(), signal.SIGUSR2)
    until("the parent is asked", lambda: watched.asked)
    assert watched.asked == ["SIGUSR2"], "not by the signal to the child"


def test_a_forked_process_stays_while_its_parent_is_asked_too(watched: Watched, child: Child) -> None:
    """A scheduler signals the parent, too. Its running step may need the forked process, such as a data loader."""
    process, line = child
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    until("the parent is asked", lambda: watched.asked == ["SIGTERM"])
    line.send("here")
    assert line.recv() == "here"
    watched.watch.stop()
    process.terminate()
    process.join(60)
    assert process.exitcode == -signal.SIGTERM, "the parent does not need it any more"


SCRIPT = """\
import pathlib, time
import torch, torch.distributed as dist
import holdfast
dist.init_process_group("gloo")
net = torch.nn.Linear(2, 1)
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(until=100_000):
        with step:
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        pathlib.Path(f"at-{dist.get_rank()}").touch()
        time.sleep(0.01)
"""


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_every_process_of_a_job_is_graceful(tmp_path: Path, number: signal.Signals) -> None:
    """Some schedulers send the signal to launcher, agent, controller, zygote and workers."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [str(BIN / "holdfast"), "run", "--nproc-per-node", "2", "--run-id", "mine", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as launcher:
        until("both train", lambda: len(list(tmp_path.glob("at-*"))) == 2)
        for pid in processes(RunDir(tmp_path / "runs/mine")):
            with suppress(ProcessLookupError):  # a process that was forked for a moment
                os.kill(pid, number)
        launcher.send_signal(number)
        _, error = launcher.communicate(timeout=60)
    assert launcher.returncode == Exit.REQUEUE, error
    (saved,) = Root(tmp_path / "ckpt").list()
    assert saved.valid and f"step {saved.step}" in error
