"""A session in one process, without a launcher: exactness, resume, bad input, exit requests."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.core.protocol.status_page import PageFlag
from holdfast.errors import (
    CheckpointInvalid,
    CheckpointMismatch,
    NothingToResume,
    StateError,
    StepError,
    StoreWriteError,
    UsageError,
)
from holdfast.exit_codes import Exit
from holdfast.frameworks.torch.state.rng import Draws, reseed
from holdfast.frameworks.torch.state.state import TorchState
from holdfast.session.steps.participant import StepParticipant
from holdfast.store.layouts.layout import Box
from holdfast.store.manage.checkpoint_root import Root
from holdfast.store.manage.retention import Moment
from tests.runtime.runs import until

pytestmark = pytest.mark.torch


class Job:
    """A training with model, optimizer, scheduler and a loader without shuffling."""

    def __init__(self, width: int = 8) -> None:
        torch.manual_seed(3)
        self.net = nn.Sequential(
            nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.ReLU(), nn.Linear(width, 1)
        )
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
        self.loader: Any = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4)

    def update(self, batch: Any) -> None:
        """Run one ordinary step."""
        (self.net(batch[0]) - batch[1]).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def session(self, **arguments: Any) -> Any:
        """Return a session of this job in which each block runs once."""
        return holdfast.session(
            model=self.net,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            seed=5,
            **{"verify_block": 0, **arguments},
        )

    def train(self, until: int, **arguments: Any) -> list[int]:
        """Train in a session. Return the step numbers that ran."""
        with self.session(**arguments) as s:
            return self.loop(s, until)

    def loop(self, s: Any, until: int) -> list[int]:
        """Run the usual loop. Return the step numbers that ran."""
        seen = []
        for step in s.steps(self.loader, until=until):
            with step as batch:
                self.update(batch)
            assert step.committed
            seen.append(step.number)
        return seen

    def tensors(self) -> list[Tensor]:
        """Return all tensors that training changes."""
        state = [v for p in self.net.parameters() for v in self.optimizer.state[p].values()]
        return [*self.net.state_dict().values(), *state, torch.tensor(self.scheduler.get_last_lr())]


def same(one: Job, two: Job) -> bool:
    """Return whether both jobs are equal, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one.tensors(), two.tensors(), strict=True))


def bare(until: int) -> Job:
    """Train without a session. Return the job."""
    job = Job()
    step = 0
    while step < until:
        for batch in job.loader:
            if step < until:
                reseed(5, Draws.same(0), step)
                job.update(batch)
                step += 1
    return job


def test_equals_a_bare_loop() -> None:
    job = Job()
    assert job.train(10) == list(range(10))
    assert same(job, bare(10))


def test_resume_continues_exactly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "holdfast"):
        Job().train(7, checkpoint=tmp_path)
        job = Job()
        assert job.train(13, checkpoint=tmp_path) == list(range(7, 13))
    assert same(job, bare(13))
    assert "starting fresh" in caplog.text and "resumed at step 7" in caplog.text
    assert "no step is left" not in caplog.text
    again = Job()
    with caplog.at_level(logging.INFO, "holdfast"):
        assert again.train(13, checkpoint=tmp_path) == []
    assert "no step is left to do in this loop: it was over at step 13" in caplog.text
    assert same(again, job)
    assert [v.step for v in Root(tmp_path).list()] == [13, 7]


def test_periodic_saves_and_retention(tmp_path: Path) -> None:
    job = Job()
    with job.session(checkpoint=tmp_path, save=2, keep=2) as s:
        for step in s.steps(job.loader, until=11):
            with step as batch:
                job.update(batch)
            until("the save is written", lambda: not s._saver.busy)
    found = Root(tmp_path).list()
    assert [(v.step, v.save_id and v.save_id.kind) for v in found] == [(11, "final"), (10, "periodic")]


def test_a_slow_disk_delays_the_next_save_and_not_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, slow_disk: Callable[[float], None]
) -> None:
    slow_disk(0.1)
    with caplog.at_level(logging.INFO, "holdfast"):
        Job().train(30, checkpoint=tmp_path, save=holdfast.EverySteps(2), keep=99)
    steps = [v.step for v in Root(tmp_path).list()]
    assert steps[0] == 30 and steps[-1] == 2 and len(steps) < 15
    assert caplog.text.count("the save due at step 4 waits until the save of step 2 is written") == 1
    assert caplog.text.count("waits") == 1


def test_save_policies_of_every_form(tmp_path: Path) -> None:
    asked: list[int] = []

    def third(now: Moment) -> bool:
        asked.append(now.step)
        return now.step == 3

    Job().train(5, checkpoint=tmp_path / "a", save=[third, timedelta(hours=1), 100, "auto"], keep=9)
    assert asked == [1, 2, 3, 4, 5]
    assert [v.step for v in Root(tmp_path / "a").list()] == [5, 3]
    for wrong in ("often", 0, -1, timedelta(0), 2.5, True, [3, "x"]):
        with pytest.raises(UsageError):
            Job().session(checkpoint=tmp_path, save=wrong)


def test_save_on_request(tmp_path: Path) -> None:
    job = Job()
    with job.session(checkpoint=tmp_path, keep=9) as s:
        for step in s.steps(job.loader, until=4):
            with step as batch:
                if step.number == 1:
                    s.save()
                job.update(batch)
    assert [v.step for v in Root(tmp_path).list()] == [4, 2]
    with pytest.raises(UsageError, match="without a checkpoint directory"), Job().session() as s:
        s.save()


def test_exception_keeps_the_last_committed_step(tmp_path: Path) -> None:
    for before_update in (True, False):
        root = tmp_path / str(before_update)
        job = Job()
        with pytest.raises(ZeroDivisionError), job.session(checkpoint=root) as s:
            for step in s.steps(job.loader, until=9):
                with step as batch:
                    if step.number == 4 and before_update:
                        job.net(batch[0]).sum().backward()
                        raise ZeroDivisionError
                    job.update(batch)
                if step.number == 3 and not before_update:
                    raise ZeroDivisionError
        after = Job()
        assert after.train(9, checkpoint=root) == [4, 5, 6, 7, 8]
        assert same(after, bare(9))


def test_torn_update_is_never_saved(tmp_path: Path) -> None:
    job = Job()
    with pytest.raises(ZeroDivisionError), job.session(checkpoint=tmp_path) as s:
        for step in s.steps(job.loader, until=9):
            with step as batch:
                job.update(batch)
                raise ZeroDivisionError
    assert Root(tmp_path).list() == []


def test_resume_words(tmp_path: Path) -> None:
    Job().train(6, checkpoint=tmp_path, save_every_steps=3, keep=9)
    other = tmp_path / "other"
    assert Job().train(4, checkpoint=other, resume=f"{tmp_path}@3") == [3]
    assert Job().train(2, checkpoint=other, resume="never") == [0, 1]
    newest = Root(tmp_path).list()[0].path
    assert Job().train(7, checkpoint=None, resume=newest) == [6]
    with pytest.raises(UsageError, match="does not exist"):
        Job().train(1, resume=str(tmp_path / "nowhere"))
    with pytest.raises(NothingToResume):
        Job().train(1, resume=f"{tmp_path}@4")


def flip(path: Path, tensor: str = "") -> None:
    """Damage one byte of the first shard: in this tensor, or near the end (in the optimizer's state)."""
    shard = next(path.glob("shard-*.safetensors"))
    data = bytearray(shard.read_bytes())
    place = len(data) - 5
    if tensor:
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        place = begin + next(
            entry["data_offsets"][0] for name, entry in header.items() if name.startswith(tensor)
        )
    data[place] ^= 1
    shard.write_bytes(data)


def test_damaged_checkpoints_fall_back_and_never_start_fresh(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Job().train(6, checkpoint=tmp_path, save_every_steps=3)
    newest, older = (Path(v.path) for v in Root(tmp_path).list())
    flip(newest)
    with caplog.at_level(logging.WARNING, "holdfast"):
        job = Job()
        assert job.train(8, checkpoint=tmp_path, save_every_steps=100) == [3, 4, 5, 6, 7]
    assert same(job, bare(8))
    assert f"rejected checkpoint {newest.name}" in caplog.text
    for path in (Path(v.path) for v in Root(tmp_path).list()):
        flip(path) if path != newest else None
    assert older.exists()
    with pytest.raises(NothingToResume, match=older.name):
        Job().train(9, checkpoint=tmp_path)
    assert Job().train(1, checkpoint=tmp_path, resume="never") == [0]


def test_copies_of_the_manifests_are_enough_to_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Job().train(4, checkpoint=tmp_path, copies=2)
    newest = Path(Root(tmp_path).list()[0].path)
    for name in ("catalogue.json", "rank-r00000.json"):
        (newest / name).write_bytes(b"")
    job = Job()
    assert job.train(8, checkpoint=tmp_path) == [4, 5, 6, 7]
    assert same(job, bare(8))
    assert "rank-r00000.json" in caplog.text and "another copy was used" in caplog.text
    with pytest.raises(UsageError, match="copies=0"):
        job.session(copies=0)


def test_another_model_is_refused_with_differences(tmp_path: Path) -> None:
    Job().train(2, checkpoint=tmp_path)
    with pytest.raises(CheckpointMismatch, match=r"mismatch: 0\.weight is F32 \[8, 4\]"):
        Job(width=6).train(3, checkpoint=tmp_path)


def test_load_without_a_session(tmp_path: Path) -> None:
    job = Job()
    job.train(4, checkpoint=tmp_path, save_every_steps=2)
    fresh = Job().net
    assert holdfast.load(tmp_path, fresh).step == 4
    assert all(map(torch.equal, fresh.state_dict().values(), job.net.state_dict().values()))
    assert holdfast.load(f"{tmp_path}@2", fresh).step == 2
    before = [p.clone() for p in fresh.parameters()]
    with pytest.raises(CheckpointMismatch, match="unexpected"):
        holdfast.load(tmp_path, fresh[0])
    flip(Path(Root(tmp_path).list()[0].path))
    assert holdfast.load(f"{tmp_path}@4", Job().net).step == 4, "damage beside the weights"
    flip(Path(Root(tmp_path).list()[0].path), "0.weight")
    with pytest.raises(CheckpointInvalid, match=r"0\.weight"):
        holdfast.load(f"{tmp_path}@4", fresh)
    assert all(map(torch.equal, before, fresh.parameters()))


def test_bad_arguments(tmp_path: Path) -> None:
    job = Job()
    with pytest.raises(UsageError, match="no framework"):
        holdfast.session(model=object(), optimizer=None)
    with pytest.raises(UsageError, match="save_every_steps=0"):
        job.session(save_every_steps=0)
    with pytest.raises(StateError, match=r"state\.x: an object of type .*Job"):
        job.train(1, state={"x": job})
    with pytest.raises(UsageError, match="needs a loader"), job.session() as s:
        s.steps()
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreWriteError, match="no checkpoint can be saved"):
        job.train(1, checkpoint=tmp_path / "file")


def test_misuse_of_a_step() -> None:
    job = Job()
    with pytest.raises(StepError, match="steps twice without a name"), job.session() as s:
        for step in s.steps(job.loader, until=2):
            with step as batch:
                job.update(batch)
                job.update(batch)
    job = Job()
    with pytest.raises(StepError, match="not entered"), job.session() as s:
        for _ in s.steps(job.loader, until=2):
            pass
    job = Job()
    with pytest.raises(StepError, match="outside of a step"), job.session() as s:
        for _ in s.steps(job.loader, until=2):
            job.update(next(iter(job.loader)))
    job = Job()
    stranger = torch.optim.SGD(job.net.parameters(), lr=1.0)
    with pytest.raises(StepError, match="does not know"), job.session() as s:
        for step in s.steps(job.loader, until=2):
            with step as batch:
                job.net(batch[0]).sum().backward()
                stranger.step()
    job.update(next(iter(job.loader)))  # the hooks were removed with the session


def test_separate_named_updates() -> None:
    def train(protected: bool) -> list[Tensor]:
        torch.manual_seed(0)
        g, d = nn.Linear(3, 3), nn.Linear(3, 1)
        og, od = torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters())

        def discriminate(x: Tensor) -> None:
            (d(x) - d(g(x).detach())).mean().backward()
            od.step()
            od.zero_grad()

        def generate(x: Tensor) -> None:
            d(g(x)).mean().backward()
            og.step()
            og.zero_grad()
            od.zero_grad()

        data = [torch.full((2, 3), float(n)) for n in range(5)]
        if not protected:
            for x in data:
                discriminate(x)
                generate(x)
        else:
            models, optimizers = {"g": g, "d": d}, {"g": og, "d": od}
            with holdfast.session(model=models, optimizer=optimizers, verify_block=0) as s:
                for step in s.steps(data):
                    with step as x:
                        with step.update("d"):
                            discriminate(x)
                        with step.update("g"):
                            generate(x)
                    assert step.committed
        return [*g.parameters(), *d.parameters()]

    assert all(map(torch.equal, train(True), train(False)))


@pytest.mark.parametrize("keyword", [True, False])
def test_closure_computes_the_gradients_before_the_vote(keyword: bool) -> None:
    def train(protected: bool) -> Job:
        job = Job()

        def update(batch: Any, state: Callable[[], str]) -> None:
            def closure() -> Any:
                assert state() == "compute"
                job.optimizer.zero_grad()
                loss = (job.net(batch[0]) - batch[1]).square().mean()
                loss.backward()
                return loss

            loss = job.optimizer.step(closure=closure) if keyword else job.optimizer.step(closure)
            assert loss is not None
            job.scheduler.step()

        if protected:
            with job.session() as s:
                for step in s.steps(job.loader, until=6):
                    with step as batch:
                        update(batch, lambda: s._rank.state)
                        assert s._rank.state == "updating"
            return job
        for step, batch in enumerate(job.loader):
            reseed(5, Draws.same(0), step)
            update(batch, lambda: "compute")
        return job

    assert same(train(True), train(False))


def test_scaler_that_skips() -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    weight = net.weight.detach().clone()
    with holdfast.session(model=net, optimizer=optimizer, scaler=scaler, verify_block=0) as s:
        for step in s.steps([torch.ones(1, 2)] * 2):
            with step as x:
                loss = net(x).sum() * (float("inf") if step.number == 0 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert step.committed
            assert torch.equal(net.weight, weight) == (step.number == 0)
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("given", [True, False])
def test_a_disabled_scaler_changes_nothing(given: bool, tmp_path: Path) -> None:
    """Scripts with a switch for mixed precision have one. It is no part of the state, and no error at an abort."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    job = Job()
    with job.session(checkpoint=tmp_path / "c", scaler=scaler if given else None) as s:
        for step in s.steps(job.loader, until=6):
            with step as batch:
                job.update(batch)
    assert same(job, bare(6))
    after = Job()
    assert after.train(8, checkpoint=tmp_path / "c", scaler=scaler if given else None) == [6, 7]
    assert same(after, bare(8))


def test_a_step_is_missed_also_beside_a_disabled_scaler() -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with (
        pytest.raises(StepError, match="no optimizer of the session took a step"),
        holdfast.session(model=net, optimizer=optimizer, scaler=scaler) as s,
    ):
        for step in s.steps([torch.ones(1, 2)] * 20):
            with step as x:
                scaler.scale(net(x).sum()).backward()
                optimizer.zero_grad()


def leaving(job: Job, tmp_path: Path, ask: Any, **arguments: Any) -> None:
    """Train, request an exit at step 3, and continue in another session. Compare with the bare training."""
    with pytest.raises(SystemExit) as left, job.session(checkpoint=tmp_path / "c", **arguments) as s:
        for step in s.steps(job.loader, until=1000):
            with step as batch:
                job.update(batch)
            if step.number == 3:
                ask()
    assert left.value.code == Exit.REQUEUE
    reached = Root(tmp_path / "c").list()[0].step
    assert 4 <= reached < 1000
    after = Job()
    assert after.train(reached + 2, checkpoint=tmp_path / "c") == [reached, reached + 1]
    assert same(after, bare(reached + 2))


def test_sigusr1_leaves_with_a_checkpoint_unless_the_script_uses_it(tmp_path: Path) -> None:
    leaving(Job(), tmp_path / "unused", lambda: os.kill(os.getpid(), signal.SIGUSR1))
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda n, _: heard.append(n))
    try:
        job = Job()
        with job.session() as s:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert len(job.loop(s, 3)) == 3 and heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_signal_leaves_with_a_checkpoint(
    tmp_path: Path, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    heard: list[int] = []
    before = signal.signal(number, lambda n, _: heard.append(n))
    try:
        leaving(Job(), tmp_path, lambda: os.kill(os.getpid(), number))
        assert heard == [number]
        os.kill(os.getpid(), number)
        assert len(heard) == 2
    finally:
        signal.signal(number, before)
    assert "Graceful exit is triggered, stop training" in capfd.readouterr().out
    assert not [t for t in threading.enumerate() if t.name.startswith("holdfast")]


def test_own_state_travels(tmp_path: Path) -> None:
    def run(until: int) -> dict[str, Any]:
        job = Job()
        own: dict[str, Any] = {"best": 0.5, "seen": {"steps": 0}, "gen": torch.Generator()}
        with job.session(checkpoint=tmp_path, state=own) as s:
            for step in s.steps(job.loader, until=until):
                with step as batch:
                    own["draw"] = None
                    job.update(batch)
                    s.state["seen"]["steps"] += 1
                    s.state["best"] = float(torch.rand((), generator=own["gen"]))
                    del own["draw"]
        return own

    run(3)
    resumed = run(5)
    assert resumed["seen"] == {"steps": 5}
    generator = torch.Generator()
    from holdfast.frameworks.torch.state.rng import reseed_generators

    reseed_generators([("gen", generator)], 5, 0, 4)
    assert resumed["best"] == float(torch.rand((), generator=generator))


def test_a_section_stands_between_two_steps() -> None:
    job = Job()
    with job.session() as s:
        for step in s.steps(job.loader, until=2):
            with s.section("eval"), pytest.raises(StepError, match="another section"), s.section("more"):
                pass
            with step as batch:
                with pytest.raises(StepError, match="inside a step"), s.section("eval"):
                    pass
                job.update(batch)
            assert step.committed


@pytest.mark.parametrize("steps", [2, 4], ids=["at the end", "before a step"])
@pytest.mark.parametrize("form", ["after the block", "before the block"])
def test_a_section_that_was_cut_off_is_run_again_or_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str, steps: int
) -> None:
    job = Job()
    with pytest.raises(RuntimeError, match="cut"), job.session(checkpoint=tmp_path) as s:
        job.loop(s, 2)
        with s.section("eval"):
            raise RuntimeError("cut")
    again = Job()
    with again.session(checkpoint=tmp_path) as s:
        for step in s.steps(again.loader, until=steps):
            if step.number == 2 and form == "before the block":
                with s.section("eval"):
                    pass
            with step as batch:
                again.update(batch)
        if steps == 2 and form == "before the block":
            with s.section("eval"):
                pass
    assert caplog.text.count('section "eval" after step 1 was cut off') == (form == "after the block")
    if steps > 2:  # the save at the end no longer records it
        caplog.clear()
        Job().train(steps + 1, checkpoint=tmp_path)
        assert "cut off" not in caplog.text


def test_compilation_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(
        StepParticipant,
        "flag",
        lambda self, what, on: seen.append(on) if what is PageFlag.COMPILING else None,
    )
    job = Job()
    with job.session() as s:
        torch.compile(nn.Linear(4, 3), backend="eager")(torch.zeros(1, 4))
        assert seen and seen == [True, False] * (len(seen) // 2)
        assert s.step == 0
    told = len(seen)
    torch.compile(nn.Linear(4, 2), backend="eager")(torch.zeros(1, 4))
    assert len(seen) == told, "not after the session"


def test_parts_copied_for_a_save_are_the_bytes_that_a_view_shows() -> None:
    """The tensors have unusual dtypes, strides and sizes. GPU tensors reach the staging memory by the same copy."""
    state = TorchState(nn.Linear(2, 2), {})
    collected = state.collect()
    transposed = torch.arange(35.0).reshape(5, 7).t()
    for name, tensor in {
        "half": torch.randn(3, 5).bfloat16(), "bool": torch.tensor([True, False, True]), "scalar": torch.tensor(7),
        "strided": transposed, "complex": torch.randn(4, dtype=torch.complex64),
    }.items():  # fmt: skip
        collected.add(tensor, name)
        box = Box.whole(tuple(tensor.shape))
        expected = bytes(collected.view(name, box))
        goal = bytearray(len(expected) + 2)
        stop = len(expected) - len(expected) // 3
        collected.copy_to(name, box, 0, stop, memoryview(goal)[1 : 1 + stop])
        if stop < len(expected):
            collected.copy_to(name, box, stop, len(expected), memoryview(goal)[1 + stop : -1])
        collected.finish_copies()
        assert bytes(goal[1:-1]) == expected and goal[0] == goal[-1] == 0


def test_a_session_that_was_not_entered_says_so() -> None:
    made = Job().session()
    for use in (lambda: made.step, lambda: made.steps(until=3), made.save, made.redo):
        with pytest.raises(UsageError, match="not entered") as caught:
            use()
        assert "with holdfast.session" in str(caught.value)


def test_an_exception_of_the_users_that_is_called_like_ours_goes_up() -> None:
    class StepAborted(Exception):
        pass

    job = Job()
    with pytest.raises(StepAborted), job.session() as s:
        for step in s.steps(job.loader):
            with step:
                raise StepAborted


def mean_of_all(steps: Any, found: list[float]) -> Any:
    """Yield the steps, with the mean of what is found after each, as ``MetricLogger.log_every`` prints it."""
    for step in steps:
        yield step
        print(sum(found) / len(found))


@pytest.mark.parametrize("where", ["helper", "loop", "in the block", "later"])
def test_an_exception_after_a_run_that_does_not_count_says_so(where: str) -> None:
    """The block of the first step also runs for its check. A meter that is filled if committed is empty then."""
    job, found = Job(), list[float]()
    with (
        pytest.raises(ZeroDivisionError) as caught,
        holdfast.session(model=job.net, optimizer=job.optimizer) as s,
    ):
        for step in mean_of_all(s.steps(job.loader), found) if where == "helper" else s.steps(job.loader):
            with step as batch:
                job.update(batch)
                _ = 1 / (where != "in the block")
            if where == "loop":
                print(sum(found) / len(found))
            if step.committed:
                found.append(1.0)
                _ = 1 / (where != "later")
    notes = getattr(caught.value, "__notes__", [])
    assert [("step 0 had a run that does not count" in note) for note in notes] == [True] * (
        where in ("helper", "loop")
    )


class Log:
    """An object with a history, which its ``state_dict`` gives as it is."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the history."""
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the history."""
        self.seen = list(state["seen"])


@pytest.mark.parametrize(("begins", "noticed"), [(1, 2), (9, 16)])  # a slow disk delays the save of step 12
def test_a_state_that_cannot_be_saved_any_more_ends_the_training_soon(
    tmp_path: Path, begins: int, noticed: int
) -> None:
    """Regression: each periodic save only warned, and the training was lost at its end."""
    job, history = Job(), Log()
    with (
        pytest.raises(StateError, match=r"state\.log\.seen\.0: an object of type .*Job cannot be saved"),
        job.session(checkpoint=tmp_path, state={"log": history}, save=6, verify_block=64) as s,
    ):
        for step in s.steps(job.loader, until=30):
            assert step.number <= noticed
            with step as batch:
                job.update(batch)
            if step.number == begins:
                history.seen.append(job)
    assert [found.step for found in Root(tmp_path).list()] == ([6] if begins > 6 else [])


@pytest.mark.parametrize("inside", [True, False])
def test_an_exit_with_a_code_saves_the_last_committed_step(tmp_path: Path, inside: bool) -> None:
    """A script may call ``sys.exit(1)`` for a loss that is not finite, before it commits a wrong update."""
    job = Job()
    with pytest.raises(SystemExit) as left, job.session(checkpoint=tmp_path) as s:
        for step in s.steps(job.loader, until=9):
            with step as batch:
                if step.number == 4 and inside:
                    sys.exit(1)
                job.update(batch)
            if step.number == 3 and not inside:
                sys.exit(1)
    assert left.value.code == 1
    after = Job()
    assert after.train(9, checkpoint=tmp_path) == [4, 5, 6, 7, 8]
    assert same(after, bare(9))


def test_an_exception_after_a_loop_without_a_step_in_this_process_says_so(tmp_path: Path) -> None:
    """The mean of an epoch divides by zero in a process that resumes after the last step of the epoch."""

    def train(ends: type[Exception]) -> list[str]:
        job, found = Job(), list[float]()
        arguments = {"model": job.net, "optimizer": job.optimizer, "scheduler": job.scheduler}
        with pytest.raises(ends) as caught, holdfast.session(**arguments, checkpoint=tmp_path) as s:  # type: ignore[arg-type]
            for _ in s.epochs(2):
                for step in s.steps(job.loader):
                    with step as batch:
                        job.update(batch)
                    if step.committed:
                        found.append(1.0)
                raise ValueError(sum(found) / len(found))
        return getattr(caught.value, "__notes__", [])

    assert train(ValueError) == []
    (note,) = train(ZeroDivisionError)
    assert "before this process joined or resumed (at step 6)" in note and "s.attach" in note


def test_a_variable_that_decides_whether_a_file_is_saved_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that resumes would replace the file of the best result by one of a worse result."""
    job, best = Job(), 1e9
    with holdfast.session(model=job.net, optimizer=job.optimizer, scheduler=job.scheduler) as s:
        for _ in s.epochs(3):
            for step in s.steps(job.loader):
                with step as batch:
                    job.update(batch)
            error = 1.0 / (s.step + 1)
            if error < best:
                best = error
                torch.save(job.net.state_dict(), tmp_path / "best.pt")
    (said,) = [each.message for each in caplog.records if "whether a file is saved" in each.message]
    assert "depends on best (test_solo.py:" in said and "session(state={...})" in said


def test_what_the_session_keeps_for_a_rank_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: a warning said that a new process begins with the ``own`` of a start."""
    job = Job()
    with holdfast.session(model=job.net, optimizer=job.optimizer, scheduler=job.scheduler) as s:
        s.own, seen = 0, s.attach("seen", {"steps": 0})
        for step in s.steps(job.loader, epochs=2):
            with step as batch:
                if s.own < 99 and seen["steps"] < 99:
                    job.update(batch)
                s.own = step.number + 1
            if step.committed:
                seen["steps"] += 1
    assert not [each.message for each in caplog.records if "depend" in each.message]


def test_an_early_stop_is_refused_where_the_job_stopped_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    """The new process runs the code after the loop first, and its count has left its first value at the next step."""

    def train(stops_at: int) -> None:
        job, late, best = Job(), 0, 1e9
        arguments: dict[str, Any] = {"model": job.net, "optimizer": job.optimizer, "scheduler": job.scheduler}
        with holdfast.session(**arguments, checkpoint=tmp_path) as s:
            for epoch in s.epochs(9):
                for step in s.steps(job.loader):
                    with step as batch:
                        job.update(batch)
                if epoch == stops_at:
                    raise KeyError(epoch)
                error = 1.0 if epoch else 0.5
                if error < best:
                    best, late = error, 0
                else:
                    late += 1
                if late > 5:
                    break

    with pytest.raises(KeyError):
        train(3)
    with pytest.raises(StepError, match=r"the updates depend on best = .*, late = 0, as at the first step"):
        train(9)


def test_a_search_that_fails_ends_no_training_and_is_not_hidden(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the check run of the first block excused the exception, so nothing was searched, without a word."""

    def fails(*_: object, **__: object) -> None:
        raise AttributeError("a defect")

    monkeypatch.setattr("holdfast.session.variables.update_variables.placed_variables", fails)
    job = Job()
    with holdfast.session(model=job.net, optimizer=job.optimizer, scheduler=job.scheduler) as s:
        for step in s.steps(job.loader):
            with step as batch:
                job.update(batch)
    (said,) = [each.message for each in caplog.records if "are not searched" in each.message]
    assert "please report AttributeError: a defect" in said


def test_a_number_that_a_resumed_job_sets_from_other_data_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Losses are often divided by the first loss. Regression: a resumed job used the first loss after the resume."""

    def train(until: int) -> None:
        job, first = Job(), None
        arguments: dict[str, Any] = {"model": job.net, "optimizer": job.optimizer, "scheduler": job.scheduler}
        with holdfast.session(**arguments, checkpoint=tmp_path) as s:
            for step in s.steps(job.loader, until=until):
                with step as batch:
                    loss = (job.net(batch[0]) - batch[1]).square().mean()
                    if first is None:
                        first = loss.item()
                    (loss / first).backward()
                    job.optimizer.step()
                    job.scheduler.step()
                    job.optimizer.zero_grad()

    train(3)
    assert not [each for each in caplog.records if "until now" in each.message]
    train(5)
    (said,) = [each.message for each in caplog.records if "until now" in each.message]
    assert re.search(r"the updates depend on first = [0-9.]+, until now on first = [0-9.]+\. What", said)
