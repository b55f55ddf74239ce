"""A spare is held before its first use of a GPU, because the GPU's memory belongs to the rank that trains there."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from holdfast.frameworks.torch.comm.deferred_rank import hold_before_device
from holdfast.runtime.node.deferred_rank import DeferredRank
from holdfast.runtime.node.process_info import alive

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("fixed", [True, False])
def test_the_first_use_of_cuda_waits_for_the_call_and_for_the_end_of_the_lost(
    fixed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    happened: list[str] = []
    waits = threading.Event()

    def wait(ready: bool) -> None:
        happened.append("ready" if ready else "held")
        waits.set()

    lost = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def initialise() -> None:
        happened.append("initialised beside the lost one" if alive(lost.pid) else "initialised")

    monkeypatch.setattr(torch.cuda, "_lazy_init", initialise)
    stand_in = DeferredRank(fixed, wait)
    hold_before_device(stand_in)
    assert not torch.cuda.is_initialized() and happened == []  # type: ignore[no-untyped-call]
    user = threading.Thread(target=torch.cuda.init)
    user.start()
    assert waits.wait(60.0) and happened == ["held"]
    stand_in.call(1, (lost.pid,))
    lost.communicate(b"\n")
    user.join(60.0)
    assert happened == ["held", "initialised"]
    torch.cuda.init()  # type: ignore[no-untyped-call]
    assert happened[2:] == ["initialised"], "a member is not held"
    assert "before its first use of a device" in capsys.readouterr().err


def test_an_allocation_from_c_comes_by_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def initialise() -> None:
        raise MemoryError("asked")

    monkeypatch.setattr(torch.cuda, "_lazy_init", initialise)
    with pytest.raises(MemoryError, match="asked"):
        torch.zeros(1, device="cuda")
