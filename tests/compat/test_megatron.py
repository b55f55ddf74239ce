"""``mindio_ttp.megatron_ttp``: the handlers of the Megatron chapter write verified checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import CheckpointInvalid, UnsupportedError, UsageError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def parts() -> tuple[object, object, object]:
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return [model], optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5)


def train(some: tuple[object, object, object], steps: int) -> list[float]:
    (model,), optimizer, schedule = some  # type: ignore[misc]
    for step in range(steps):
        optimizer.zero_grad()  # type: ignore[attr-defined]
        model(torch.full((3, 4), step / 10)).sum().backward()  # type: ignore[has-type]
        optimizer.step()  # type: ignore[attr-defined]
        schedule.step()  # type: ignore[attr-defined]
    return [float(p) for parameter in model.parameters() for p in parameter.detach().flatten()]  # type: ignore[has-type]


def test_saved_published_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.compat import megatron_ttp as mega

    monkeypatch.setenv("HOLDFAST_CHECKPOINT", str(tmp_path / "ckpts"))
    assert mega.load_checkpoint(*parts()) == 0
    saved = parts()
    train(saved, 6)
    mega.ttp_save_checkpoint(6, [{"type": 0, "ranks": [2]}], (6, *saved))
    mega.rename_save_result(6)
    with pytest.raises(CheckpointInvalid, match="not 7"):
        mega.rename_save_result(7)
    loaded = parts()
    assert mega.load_checkpoint(*loaded) == 6
    assert train(loaded, 4) == train(saved, 4)
    data = next((tmp_path / "ckpts").glob("step-*/*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointInvalid):
        mega.load_checkpoint(*parts())


def test_an_optimizer_with_a_part_of_the_state_is_not_taken_for_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from holdfast.compat import megatron_ttp as mega

    monkeypatch.setattr(mega, "sharers", lambda: (0, frozenset({0, 1})))
    (model,), _, schedule = parts()  # type: ignore[misc]
    optimizer = torch.optim.Adam([model.bias], lr=0.1)  # type: ignore[has-type]
    model(torch.ones(3, 4)).sum().backward()  # type: ignore[has-type]
    optimizer.step()
    with pytest.raises(UnsupportedError, match=r"writers \[0, 1\]"):
        mega.ttp_save_checkpoint(1, [{"type": 0, "ranks": [0, 1]}], (1, [model], optimizer, schedule))  # type: ignore[has-type]


def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    from holdfast.compat import framework_ttp as ttp
    from holdfast.compat import megatron_ttp as mega

    with pytest.raises(UnsupportedError, match=r"writers \[0, 1\]"):
        mega.ttp_save_checkpoint(1, [{"type": 0, "ranks": [0, 1]}], (1, *parts()))
    with pytest.raises(UsageError, match="two ranks have to hold"):
        ttp.ttp_init_processor(0, [0, 1, 2], 3, 3, 1 + 1)
    with pytest.raises(UnsupportedError, match="TLS"):
        ttp.tft_start_controller("127.0.0.1", 1, enable_tls=True)
    with pytest.raises(UnsupportedError, match="ARF"):
        ttp.tft_init_controller(0, 2, enable_arf=True)
    with pytest.raises(UsageError, match="comes first"):
        ttp.ttp_start_updating_os(-1)
