"""Objects of the script that count on one rank: their values over faults, and what cannot be kept."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, defaultdict, deque
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import event_log
from holdfast.errors import UsageError
from holdfast.exit_codes import Exit
from holdfast.session.loops.own_values import OwnValues
from holdfast.session.loops.plain_attributes import NotPlainError, plain_copy, put_back
from holdfast.store.format.json_values import decode_values, encode_values
from tests.session.launch import run_job

JOB = str(Path(__file__).with_name("meters_job.py"))


class Kind(Enum):
    MEAN = 1


class Meter:
    def __init__(self) -> None:
        self.last: deque[float] = deque(maxlen=3)
        self.total, self.best = 0.0, (0, float("inf"))
        self.reduce, self.kind, self.device, self.log = (
            max,
            Kind.MEAN,
            torch.device("cpu"),
            logging.getLogger("x"),
        )

    def add(self, value: float) -> None:
        self.last.append(value)
        self.total += value
        self.best = min(self.best, (len(self.last), value))


class Meters:
    def __init__(self) -> None:
        self.by_name: dict[str, Meter] = defaultdict(Meter)
        self.of_layer: dict[int, list[float]] = {}
        self.title = "train"

    def add(self, value: float) -> None:
        for name in ("loss", "norm"):
            self.by_name[name].add(value)
        self.of_layer.setdefault(3, []).append(value)


def counted(*values: float) -> Meters:
    found = Meters()
    for value in values:
        found.add(value)
    return found


def told(meters: Meters) -> Any:
    by_name = {name: (list(m.last), m.last.maxlen, m.total, m.best) for name, m in meters.by_name.items()}
    return by_name, meters.of_layer, meters.title


def sent(values: dict[str, Any]) -> dict[str, Any]:
    found = decode_values(encode_values(values))
    assert isinstance(found, dict)
    return found


def test_a_new_object_gets_the_values_of_the_process_before() -> None:
    before, after = OwnValues(), OwnValues()
    before.attach("train", counted(1.0, 2.0, 0.5, 4.0), "0.1.")
    after.go_back(sent(before.entries(before.attached())))
    fresh = Meters()
    after.attach("train", fresh, "0.1.")
    fresh.by_name["loss"] = Meter()  # the script builds the object further
    assert fresh.title == "train" and after.entries(after.attached()) == before.entries(before.attached())
    after.put()
    assert told(fresh) == told(counted(1.0, 2.0, 0.5, 4.0))
    fresh.add(7.0)
    assert told(fresh) == told(counted(1.0, 2.0, 0.5, 4.0, 7.0))


def test_an_object_of_another_turn_begins_fresh() -> None:
    before, after = OwnValues(), OwnValues()
    before.attach("train", counted(1.0), "0.1.")
    after.go_back(sent(before.entries(before.attached())))
    fresh = Meters()
    after.attach("train", fresh, "0.2.")
    after.put()
    assert told(fresh) == told(Meters()) and after.entries(after.attached())["attached"] == {
        "train": {"turn": "0.2.", "values": plain_copy(fresh, objects=True)}
    }


def test_values_wait_for_their_object_and_pass_through_a_process_that_has_none() -> None:
    before, between, after = OwnValues(), OwnValues(), OwnValues()
    before.attach("train", counted(1.0), "0.1.")
    between.go_back(sent(before.entries(before.attached())))
    after.go_back(sent(between.entries(between.attached())))
    fresh = Meters()
    after.attach("train", fresh, "0.1.")
    after.put()
    assert told(fresh) == told(counted(1.0))


def test_a_live_object_goes_back() -> None:
    mine, objects = counted(1.0), OwnValues()
    inner, last = mine.by_name, mine.by_name["loss"].last
    objects.attach("train", mine, "")
    before = copy.deepcopy(objects.entries(objects.attached()))
    mine.add(5.0)
    mine.by_name["other"].add(5.0)
    objects.go_back(before)
    assert told(mine) == told(counted(1.0))
    assert mine.by_name is inner and mine.by_name["loss"].last is last


class Holder:
    def __init__(self, value: object) -> None:
        self.inner = {"value": value}


def cycle() -> Holder:
    found = Holder(0)
    found.inner["value"] = found
    return found


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (torch.zeros(()), "is a Tensor"),
        (np.zeros(2), "is a ndarray"),
        (torch.nn.Linear(1, 1), "is a Tensor|is a Parameter|is a OrderedDict"),
        ({1, 2}, "is a set"),
        ([Meter()], "is a list of objects"),
        (iter([1]), "is a list_iterator"),
        ([0] * 20_001, "holds more than 20000 values"),
        (cycle(), "refers to itself"),
    ],
)
def test_what_cannot_be_kept_is_named_where_it_is_attached(value: object, named: str) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        OwnValues().attach("train", Holder(value), "")
    assert "attach('train', ...)" in str(caught.value) and ".inner['value']" in str(caught.value)


def test_an_object_of_another_form_is_refused() -> None:
    before, after = OwnValues(), OwnValues()
    before.attach("train", Holder(Meter()), "")
    after.go_back(sent(before.entries(before.attached())))
    after.attach("train", Holder(None), "")
    with pytest.raises(UsageError, match=r"\.inner\['value'\] was an object, and is missing here"):
        after.put()


def test_a_copy_is_put_back_without_a_change() -> None:
    scalars = [
        np.float64(0.1),
        np.float32(0.1),
        np.int64(2**40),
        np.bool_(True),
        np.uint8(7),
        np.float16(0.1),
    ]
    mine = {"a": [1, (2, [3.5]), None], 4: OrderedDict(x="y"), "m": counted(1.0), "n": scalars}
    kept = sent({"it": plain_copy(mine, objects=True)})["it"]
    assert put_back(mine, kept) is mine and plain_copy(mine, objects=True) == kept
    assert [type(each) for each in mine["n"]] == [type(each) for each in scalars] and mine["n"] == scalars
    assert plain_copy({"a": [1, deque([2])]}, objects=False) == {"a": [1, [2]]}
    for value in ((1,), Meter(), {1: 2}, np.float64(1.0)):
        with pytest.raises(NotPlainError):
            plain_copy(value, objects=False)


def reports(where: Path, faults: str, code: int = 0) -> tuple[dict[str, str], list[str]]:
    """Train two ranks. Return their reports by rank and epoch, and the verdicts."""
    where.mkdir(exist_ok=True)
    run_id = f"it{len(list(where.glob('runs/*')))}"
    done = run_job(where, 2, "--run-id", run_id, JOB, str(where / "result"), faults)
    assert done.returncode == code, done.stdout
    found = event_log.read(where / f"runs/{run_id}/events.jsonl").events
    texts = {path.name: path.read_text() for path in where.glob("result-*-*")}
    return texts, [e.data["action"] for e in found if e.kind == "verdict"]


@pytest.mark.torch
@pytest.mark.processes
def test_reports_of_an_epoch_are_those_of_the_undisturbed_run(tmp_path: Path) -> None:
    """Regression: after a kill behind the steps of an epoch each start divided by zero, and the job could not end."""
    calm, _ = reports(tmp_path / "calm", "")
    assert len(calm) == 6
    killed, verdicts = reports(tmp_path / "killed", "1@block@2,0@next@6,1@report@1")
    assert killed == calm and len(verdicts) == 3, verdicts
    reports(tmp_path / "stopped", "0@stop@5", code=Exit.REQUEUE)
    resumed, _ = reports(tmp_path / "stopped", "0@stop@5")
    assert resumed == calm
