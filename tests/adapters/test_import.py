"""Files of other programs become a checkpoint from which a session can resume, or are refused with a next step."""

from __future__ import annotations

import resource
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader

import holdfast
from holdfast.cli.main import answer
from holdfast.core.ids import STEP_MAX
from holdfast.errors import CheckpointInvalid, StateError, StoreWriteError, UsageError
from holdfast.frameworks.torch.files.dcp_keys import KEYS, restore_keys
from holdfast.frameworks.torch.files.exports import Form, export_checkpoint
from holdfast.frameworks.torch.files.imports import import_checkpoint
from holdfast.frameworks.torch.state.state import TorchState
from holdfast.store.backends.durable_files import Directory
from holdfast.store.backends.location import Place
from holdfast.store.manage.checkpoint_root import Root
from holdfast.store.manage.checkpoint_tools import merge
from holdfast.store.read.load import load_catalogue
from holdfast.store.read.load import load_values as read_values
from holdfast.store.read.validation import inspect

pytestmark = pytest.mark.torch


def small() -> nn.Sequential:
    """Return two layers."""
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def trained(net: nn.Module, **kinds: Any) -> torch.optim.Adam:
    """Return an optimizer after one update of ``net``. With ``named=True`` it knows the parameter names."""
    parameters: Any = net.named_parameters() if kinds.get("named") else net.parameters()
    optimizer = torch.optim.Adam(parameters)
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return optimizer


def values_of(path: Place) -> dict[str, Any]:
    """Return the plain values of a checkpoint."""
    return dict(read_values(path))


def imported(tmp_path: Path, tree: Any, **given: Any) -> Place:
    """Return the checkpoint that a torch.save file of ``tree`` is imported to."""
    torch.save(tree, tmp_path / "t.pt")
    return import_checkpoint(tmp_path / "t.pt", tmp_path / "root", **given)


def test_an_import_that_failed_is_in_nobodys_way(tmp_path: Path) -> None:
    """After a full disk or a kill, the same command makes the import when there is room."""
    torch.save({"w": torch.zeros(1000, 1000)}, tmp_path / "t.pt")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with pytest.raises(StoreWriteError, match="File too large"):
            import_checkpoint(tmp_path / "t.pt", tmp_path / "root")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (left,) = (tmp_path / "root").iterdir()
    with Directory.open(left) as other:
        assert other.lock(shared=True)
        with pytest.raises(UsageError, match="exists"):
            import_checkpoint(tmp_path / "t.pt", tmp_path / "root")
    assert import_checkpoint(tmp_path / "t.pt", tmp_path / "root") == left
    assert inspect(left, deep=True).sealed
    with pytest.raises(UsageError, match="exists"):
        import_checkpoint(tmp_path / "t.pt", tmp_path / "root")
    assert inspect(left, deep=True).sealed


def test_a_step_that_no_directory_can_be_named_after_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "w.pt")
    target = tmp_path / "root"
    for step in (STEP_MAX + 1, -1):
        with pytest.raises(UsageError, match="cannot be saved"):
            import_checkpoint(tmp_path / "w.pt", target, step=step)
    assert answer(["ckpt", "import", str(tmp_path / "w.pt"), str(target), "--step", str(STEP_MAX + 1)]) == 2
    assert str(STEP_MAX) in capsys.readouterr().err and not target.exists()
    import_checkpoint(tmp_path / "w.pt", target, step=STEP_MAX)
    assert Root(target).newest_valid().require().step == STEP_MAX


@pytest.mark.parametrize("said", [7, 7.0, torch.tensor(7), torch.tensor(7.0)])
@pytest.mark.parametrize("key", ["step", "global_step"])
def test_the_step_is_read_as_people_write_it(tmp_path: Path, key: str, said: Any) -> None:
    made = imported(tmp_path, {"model": small().state_dict(), key: said})
    assert inspect(made).step == 7 and values_of(made)["state"] == {}


@pytest.mark.parametrize("said", [True, -1, 7.5, float("nan"), "7", torch.tensor([7]), {"of": 7}])
def test_a_step_that_is_no_number_is_refused_unless_one_is_given(tmp_path: Path, said: Any) -> None:
    tree = {"model": small().state_dict(), "step": said}
    with pytest.raises(UsageError, match="its step is no number") as caught:
        imported(tmp_path, tree)
    assert "--step" in caught.value.hint
    made = imported(tmp_path, tree, step=3)
    assert inspect(made).step == 3 and set(values_of(made)["state"]) == {"step"}


def wrapped(prefix: str, names: dict[str, Any]) -> dict[str, Any]:
    """Return names with the prefix of a wrapper."""
    return {prefix + name: value for name, value in names.items()}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_the_prefix_of_a_wrapper_is_taken_off_and_said(tmp_path: Path, prefix: str) -> None:
    net = small()
    optimizer = trained(net, named=True).state_dict()
    for group in optimizer["param_groups"]:
        group["param_names"] = [prefix + name for name in group["param_names"]]
    lines: list[str] = []
    tree = {"model": wrapped(prefix, net.state_dict()), "optimizer": optimizer, "step": 1}
    made = imported(tmp_path, tree, note=lines.append)
    assert {n for n in load_catalogue(made).by_fqn if not n.startswith("optimizer.")} == set(net.state_dict())
    assert "optimizer.default.0.weight.exp_avg" in load_catalogue(made).by_fqn
    assert len(lines) == 1 and f"{prefix}0.weight is 0.weight" in lines[0]
    fresh = small()
    holdfast.load(made, fresh)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), fresh.parameters(), strict=True))
    resumed = TorchState(fresh, {"default": torch.optim.Adam(fresh.parameters())})
    resumed.restore(load_catalogue(made), {**values_of(made), "scaler": None})  # does not raise


def test_names_are_unwrapped_where_they_are_wrapped_and_nowhere_else(tmp_path: Path) -> None:
    lines: list[str] = []
    tree = {
        "generator": wrapped("module.", small().state_dict()),
        "part": {"0._orig_mod.weight": torch.ones(2), "1.weight": torch.ones(3)},
        "own": {"module.weight": torch.ones(4), "other": torch.ones(5)},
    }
    made = imported(tmp_path, {"model": tree}, note=lines.append)
    assert set(load_catalogue(made).by_fqn) == {
        "generator.0.weight", "generator.0.bias", "generator.1.weight", "generator.1.bias",
        "part.0.weight", "part.1.weight", "own.module.weight", "own.other",
    }  # fmt: skip
    assert len(lines) == 1
    lines.clear()
    imported(tmp_path, small().state_dict(), step=2, note=lines.append)
    assert not lines


def test_an_optimizer_of_the_wrapper_with_the_weights_of_the_module(tmp_path: Path) -> None:
    net = small()
    optimizer = trained(net, named=True).state_dict()
    group = optimizer["param_groups"][0]
    group["param_names"] = [f"module.{name}" for name in group["param_names"]]
    made = imported(tmp_path, {"model": net.state_dict(), "optimizer": optimizer, "step": 1})
    assert values_of(made)["optimizers"]["default"]["members"] == [list(net.state_dict())]


def test_lightnings_layout(tmp_path: Path) -> None:
    net = small()
    optimizer = trained(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    tree = {"epoch": 1, "global_step": 12, "pytorch-lightning_version": "2.5", "state_dict": net.state_dict(),
            "optimizer_states": [optimizer.state_dict()], "lr_schedulers": [scheduler.state_dict()]}  # fmt: skip
    made = imported(tmp_path, tree)
    values = values_of(made)
    assert inspect(made).step == 12 and set(values["state"]) == {"epoch", "pytorch-lightning_version"}
    assert set(values["optimizers"]) == set(values["schedulers"]) == {"default"}
    two = imported(tmp_path, {**tree, "optimizer_states": [optimizer.state_dict()] * 2, "global_step": 13})
    assert set(values_of(two)["optimizers"]) == {"0", "1"}
    assert values_of(imported(tmp_path, {**tree, "optimizer_states": []}, step=1))["optimizers"] == {}


@pytest.mark.parametrize("form", [lambda o: o, lambda o: [o], lambda o: {"g": o}])
def test_an_optimizer_under_another_name_is_refused(tmp_path: Path, form: Any) -> None:
    net = small()
    tree = {"model": net.state_dict(), "opt_g": form(trained(net).state_dict()), "step": 1}
    with pytest.raises(UsageError, match="opt_g is an optimizer's state") as caught:
        imported(tmp_path, tree)
    assert "'optimizer'" in caught.value.hint and not (tmp_path / "root").exists()


def test_safetensors_are_weights_alone(tmp_path: Path) -> None:
    net = small().to(torch.bfloat16)
    whole = imported(tmp_path, {"model": net.state_dict()})
    (file,) = export_checkpoint(whole, tmp_path / "hf", "hf")
    made = import_checkpoint(file, tmp_path / "new", step=5)
    fresh = small().to(torch.bfloat16)
    holdfast.load(made, fresh)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), fresh.parameters(), strict=True))
    odd = Path(file).read_bytes()
    header = odd[8:].split(b"}}")[0] + b"}}"
    start = 8 + int.from_bytes(odd[:8], "little")
    (tmp_path / "odd.safetensors").write_bytes(
        (len(header) + len(header) % 2 + 1).to_bytes(8, "little") + header.ljust(len(header) + len(header) % 2 + 1)
        + odd[start:]
    )  # fmt: skip
    holdfast.load(import_checkpoint(tmp_path / "odd.safetensors", tmp_path / "odd"), fresh)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), fresh.parameters(), strict=True))


def test_safetensors_of_more_than_weights_are_refused(tmp_path: Path) -> None:
    net = small()
    whole = imported(tmp_path, {"model": net.state_dict(), "optimizer": trained(net).state_dict(), "step": 3})
    (merged,) = merge(whole, tmp_path / "all.safetensors")
    with pytest.raises(UsageError, match=r"optimizer\.default") as caught:
        import_checkpoint(merged, tmp_path / "new")
    assert "--to torch" in caught.value.hint and not (tmp_path / "new").exists()
    (tmp_path / "cut.safetensors").write_bytes(Path(merged).read_bytes()[:-1])
    with pytest.raises(CheckpointInvalid, match=r"cut\.safetensors"):
        import_checkpoint(tmp_path / "cut.safetensors", tmp_path / "new")


def test_what_is_no_torch_file_is_called_so(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1000)}, tmp_path / "new.pt")
    torch.save({"w": torch.zeros(1000)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert import_checkpoint(tmp_path / "old.pt", tmp_path / "root").name.startswith("step-00000000.imported")
    for name in ("new.pt", "old.pt"):
        data = (tmp_path / name).read_bytes()
        for size in (len(data) // 2, len(data) - 200, 40):
            (tmp_path / "cut.pt").write_bytes(data[:size])
            with pytest.raises(CheckpointInvalid, match="truncated") as caught:
                import_checkpoint(tmp_path / "cut.pt", tmp_path / "x")
            assert caught.value.hint
    for text in (b"", b"root:x:0:0", b"\x80\x02]q\x00."):
        (tmp_path / "text").write_bytes(text)
        with pytest.raises(UsageError, match=r"is no torch\.save file") as wrong:
            import_checkpoint(tmp_path / "text", tmp_path / "x")
        assert "DCP" in wrong.value.hint


KEYED = {
    "numbers": {1: "a", 2: {3: torch.ones(2)}}, "counter": Counter({30: 1, 60: 2}), "odd": {None: 1, (1, 2): 2, 2.5: 3},
    "empty": {}, "deep": {"a": {"b": {}}, "c": [{}, 1, [{}], {4: "d"}]}, "lists": [[], [1], {"x": {5: 6}}],
}  # fmt: skip


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_keys_that_are_no_text_come_back_as_they_were(tmp_path: Path, to: Form) -> None:
    path = imported(tmp_path, {"model": small().state_dict(), "step": 4, **KEYED})
    export_checkpoint(path, tmp_path / "out", to)
    made = import_checkpoint(tmp_path / "out", tmp_path / "new")
    saved, loaded = values_of(path)["state"], values_of(made)["state"]
    assert saved == loaded and type(loaded["counter"]) is Counter
    assert loaded["numbers"][2][3] == {"@": "tensor", "v": "state.numbers.2.3"}


def test_a_schedule_by_milestones_survives_a_dcp_directory(tmp_path: Path) -> None:
    net = small()
    optimizer = trained(net)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    path = imported(tmp_path, {"model": net.state_dict(), "optimizer": optimizer.state_dict(),
                               "scheduler": scheduler.state_dict(), "step": 1})  # fmt: skip
    export_checkpoint(path, tmp_path / "out", "dcp")
    made = import_checkpoint(tmp_path / "out", tmp_path / "new")
    assert values_of(made)["schedulers"]["default"]["milestones"] == Counter({3: 1, 5: 1})
    template = {"scheduler": scheduler.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        state_dict_loader.load(template, storage_reader=FileSystemReader(tmp_path / "out"), no_dist=True)
    assert template["scheduler"]["last_epoch"] == 0, "torch reads it as before"


def test_keys_that_are_one_text_are_refused_by_name(tmp_path: Path) -> None:
    path = imported(tmp_path, {"model": small().state_dict(), "step": 4, "twice": {1: "a", "1": "b"}})
    with pytest.raises(StateError, match=r"state\.twice has two keys") as caught:
        export_checkpoint(path, tmp_path / "out", "dcp")
    assert "torch" in caught.value.hint and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "note", [7, [1], [[["a"], "dict", 3]], [[[], "dict", ["nothing"]]], [[["a"], "dict", [[]]]]]
)
def test_a_foreign_note_of_keys_is_refused(note: Any) -> None:
    with pytest.raises(CheckpointInvalid, match=r"holdfast\.keys"):
        restore_keys({"a": {"b": 1}, KEYS: note}, "x")


def test_a_part_under_another_name_is_mapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = small()
    torch.save({"net": net.state_dict(), "opt": trained(net).state_dict(), "it": 7}, tmp_path / "t.pt")
    source, root = str(tmp_path / "t.pt"), str(tmp_path / "root")
    assert answer(["ckpt", "import", source, root]) != 0
    capsys.readouterr()
    assert answer(["ckpt", "import", source, root, "--map", "net=model", "--map", "it=step"]) != 0
    assert "--map opt=optimizer" in capsys.readouterr().err
    mapped = ["--map", "net=model", "--map", "opt=optimizer", "--map", "it=step"]
    assert answer(["ckpt", "import", source, root, *mapped]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert set(values_of(path)["optimizers"]) == {"default"} and inspect(path).step == 7


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"opt": "optimiser"}, "there is no part optimiser"),
        ({"otp": "optimizer"}, "has no key otp; its keys are model, opt, optim"),
        ({"opt": "optimizer"}, "has the part optimizer already: optim"),
    ],
)
def test_what_cannot_be_mapped(tmp_path: Path, names: dict[str, str], says: str) -> None:
    net = small()
    state = trained(net).state_dict()
    with pytest.raises(UsageError, match=says):
        imported(tmp_path, {"model": net.state_dict(), "opt": state, "optim": state}, names=names, step=1)
