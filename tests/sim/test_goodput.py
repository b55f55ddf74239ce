"""Goodput by cause, against a seeded simulation of the same assumptions; runs from a file of faults; large worlds."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from holdfast.cli.main import answer
from holdfast.exit_codes import Exit
from holdfast.sim.faults import SimFault
from holdfast.sim.goodput import Cause, Forecast, default_causes, forecast
from holdfast.sim.summary import faults_of
from holdfast.sim.world import run_sim


def test_no_faults_no_loss_and_all_shares_add_up() -> None:
    calm = forecast(4096, [Cause(name="never", rank_hours=1e15, stop_s=60.0, redo_s=1.0)])
    assert calm.goodput == pytest.approx(1.0)
    for ranks in (8, 4096, 65536):
        told = forecast(ranks, default_causes(50_000, 10.0, 30.0))
        assert told.goodput + sum(loss.share for loss in told.losses) == pytest.approx(1.0)
    goodputs = [forecast(n, default_causes(50_000, 10.0, 30.0)).goodput for n in (64, 1024, 16384)]
    assert goodputs == sorted(goodputs, reverse=True)


def test_the_formula_is_what_happens() -> None:
    """Faults are drawn one by one. A fault during a stop restarts the stop."""
    cause = Cause(name="any", rank_hours=1.0, stop_s=20.0, redo_s=3.0)
    rate, draw = 40 / 3600.0, random.Random(5)
    useful_s = lost_s = 0.0
    for _ in range(20_000):
        useful_s += draw.expovariate(rate)
        while (next_s := draw.expovariate(rate)) < cause.stop_s:
            lost_s += next_s
        lost_s += cause.stop_s + cause.redo_s
    assert useful_s / (useful_s + lost_s) == pytest.approx(forecast(40, [cause]).goodput, abs=0.005)


def test_command_tells_the_forecast(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    causes = tmp_path / "causes.json"
    causes.write_bytes(msgspec.json.encode(default_causes(10_000, 5.0, 60.0)))
    words = ["sim", "--ranks", "4096", "--forecast", "--causes", str(causes), "--json"]
    assert answer(words) == Exit.OK
    told = msgspec.json.decode(capfd.readouterr().out, type=Forecast)
    assert told == forecast(4096, default_causes(10_000, 5.0, 60.0))
    causes.write_text('[{"name": "disk"}]')
    assert answer(words) == Exit.USAGE
    example = capfd.readouterr().err.partition("for example ")[2]
    assert msgspec.json.decode(example, type=tuple[Cause, ...]), "the hint shows what is taken"


def test_command_runs_the_faults_of_a_file(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    faults = (SimFault(kind="kill", at_s=0.8, rank=3, state="voting"), SimFault(kind="controller", at_s=0.81))
    path = tmp_path / "faults.json"
    path.write_bytes(msgspec.json.encode(faults))
    assert answer(["sim", "--ranks", "6", "--seed", "7", "--faults", str(path)]) == Exit.OK
    out = capfd.readouterr().out
    assert run_sim(6, 7, faults).digest in out and "recovered" in out
    path.write_text('[{"kind": "no such fault", "at_s": 1}]')
    assert answer(["sim", "--faults", str(path)]) == Exit.USAGE
    assert "no such fault" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "seed"), [(256, 1), (1024, 2), pytest.param(4096, 7, marks=pytest.mark.more)]
)
def test_large_worlds_recover(ranks: int, seed: int) -> None:
    faults = (SimFault(kind="kill", at_s=0.5, rank=ranks // 2),)
    result = run_sim(ranks, seed, faults, until=3)
    assert (result.code, result.step, result.recovered) == (Exit.OK, 3, 1)


def test_a_large_run_is_a_function_of_its_seed() -> None:
    script = "from holdfast.sim.summary import faults_of\nfrom holdfast.sim.world import run_sim\n"
    script += "print(run_sim(128, 9, faults_of(128, 9), until=4).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": value},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for value in ("1", "77")
    }
    assert digests == {run_sim(128, 9, faults_of(128, 9), until=4).digest}
