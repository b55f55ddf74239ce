"""``holdfast ckpt`` on a root, on a place with an unusual name, or on damaged files."""

from __future__ import annotations

import json
import os
import shlex
import time
from pathlib import Path

import click
import numpy as np
import pytest

from holdfast.cli.commands.ckpt import size_bytes
from holdfast.cli.main import answer
from holdfast.cli.screen.checkpoint_contents import readable
from holdfast.errors import NothingToResume, UsageError
from holdfast.store.backends.interfaces import Attempt
from holdfast.store.backends.location import place_of
from holdfast.store.manage.checkpoint_root import find, resolve
from holdfast.store.read import load, validation
from holdfast.store.read.validation import Index, inspect, read_index
from tests.cli.command import on_terminal
from tests.store.test_damage import flip
from tests.store.worlds import pipeline, replicated, save, save_id

WORLD = pipeline(edge=8)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Run one ``holdfast ckpt`` command. Return exit code, output and errors."""
    code = answer(["ckpt", *args])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def shard(root: Path, step: int) -> Path:
    """Return the path of a shard file of this step."""
    return root / save_id(step).directory() / "shard-r00000-000.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make steps 10, 20 and 30. Step 30 has a damaged header (rebuilt from its manifest), step 20 is cut off (lost)."""
    for step in (10, 20, 30):
        save(tmp_path / "root", WORLD, save_id(step))
    flip(shard(tmp_path / "root", 30), 9)
    os.truncate(shard(tmp_path / "root", 20), shard(tmp_path / "root", 20).stat().st_size - 1)
    return tmp_path / "root"


def test_names_are_shown_as_they_are_and_in_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, replicated(1, {"w[red]": np.zeros(3), "重み": np.zeros(3)}), save_id(1))
    for command in ("show", "holders"):
        lines = run(capsys, command, str(tmp_path))[1].splitlines()
        start = next(n for n, line in enumerate(lines) if line.startswith("tensor  dtype  shape"))
        assert lines[start + 1].startswith("w[red]  F64    [3]")
        assert lines[start + 2].startswith("重み    F64    [3]")


def test_thousands_of_rows_are_laid_out_plainly_on_a_terminal_too(tmp_path: Path) -> None:
    """rich takes a third of a millisecond per row to fold cells, so the cells of very many rows are not folded."""
    save(tmp_path, replicated(1, {f"w{n}[red]" * 20: np.zeros(1) for n in range(1001)}), save_id(1))
    code, said = on_terminal("ckpt", "show", str(tmp_path), cwd=tmp_path, env={"COLUMNS": "80"})
    assert code == 0 and f"\n{'w7[red]' * 20} " in said


@pytest.mark.parametrize("command", [["show"], ["merge", "out.safetensors"]])
def test_an_attempt_is_looked_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """One inspection of a save with 20,000 tensors takes half a second."""
    looks: list[str] = []

    def counted(directory: Attempt) -> Index:
        looks.append(directory.path.name)
        return read_index(directory)

    for module in (load, validation):
        monkeypatch.setattr(module, "read_index", counted)
    save(tmp_path, WORLD, save_id(1))
    attempt = tmp_path / save_id(1).directory()
    assert run(capsys, command[0], str(attempt), *[str(tmp_path / name) for name in command[1:]])[0] == 0
    assert looks == [attempt.name]


def test_one_rank_and_one_tensor_are_counted_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, replicated(1, {"w": np.zeros(3)}), save_id(1))
    assert "1 rank, written by 1," in run(capsys, "show", str(tmp_path))[1]
    assert "1 tensor, " in run(capsys, "verify", str(tmp_path))[1]


def test_what_was_passed_over_is_said(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / save_id(40).directory()).mkdir()
    for command in (["verify"], ["show"], ["holders"], ["merge", str(tmp_path / "out.safetensors")]):
        code, out, err = run(capsys, command[0], str(root), *command[1:])
        lines = err.splitlines()
        assert code == 0 and out and len(lines) == 3, err
        assert save_id(40).directory() in lines[0] and "no rank has finished" in lines[0]
        assert "repair" not in lines[0], "it was never finished"
        assert save_id(30).directory() in lines[1] and "header" in lines[1]
        assert f"holdfast ckpt repair --dry-run {root / save_id(30).directory()}" in lines[1]
        assert save_id(20).directory() in lines[2]
    code, out, _ = run(capsys, "verify", str(root), "--json")
    assert json.loads(out)["step"] == 10 and code == 0
    code, _, err = run(capsys, "verify", str(root / save_id(10).directory()))
    assert code == 0 and not err


def test_repair_of_a_root_mends_the_newest_that_can_be(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(shard(root, 30), shard(root, 30).stat().st_size - 1)
    flip(shard(root, 20), 9)
    code, out, err = run(capsys, "repair", str(root), "--dry-run")
    assert (
        code == 0
        and "step-00000030" in err
        and "step-00000020" in err
        and err.count("cannot be rebuilt") == 2
    )
    assert "step-00000010" in out
    for step in (20, 30):
        save(root, WORLD, save_id(step, attempt=1))
    flip(root / save_id(30, attempt=1).directory() / "shard-r00000-000.safetensors", 9)
    code, out, _ = run(capsys, "repair", str(root), "--json")
    done = json.loads(out)
    assert code == 0 and done["sealed"] and done["rebuilt"] == ["shard-r00000-000.safetensors"]
    assert Path(done["path"]).name == save_id(30, attempt=1).directory() and inspect(done["path"]).valid
    code, out, err = run(capsys, "repair", str(root))
    assert code == 0 and "nothing to repair" in out and not err
    code, _, err = run(capsys, "repair", f"{root}@20")
    assert code == 0 and not err


def test_where_nothing_is_valid_repair_is_next(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = root / save_id(30).directory()
    with pytest.raises(NothingToResume) as caught:
        resolve(f"{root}@30")
    assert caught.value.hint.startswith(f"holdfast ckpt repair --dry-run {newest}")
    code, out, _ = run(capsys, "repair", f"{root}@30")
    assert code == 0 and "valid and sealed" in out
    code, _, err = run(capsys, "repair", f"{root}@20")
    assert code == 3 and "next: it cannot be rebuilt" in err
    (root / save_id(40).directory()).mkdir()
    code, _, err = run(capsys, "repair", f"{root}@40")
    assert code == 3 and err.splitlines()[-1] == f"  next: holdfast ckpt ls {root}"


def test_a_damaged_checkpoint_has_a_next_step_in_every_command(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shard(root, 10).parent
    flip(shard(root, 10), shard(root, 10).stat().st_size - 1)
    target = str(tmp_path / "out")
    for command, *rest in (["verify"], ["merge", target]):
        code, _, err = run(capsys, command, str(path), *rest)
        assert code == 3 and err.splitlines()[-1].startswith(f"  next: holdfast ckpt repair --dry-run {path}")
    (path / "rank-r00000.json").write_bytes(b"")
    for command in ("show", "holders"):
        code, _, err = run(capsys, command, str(path))
        assert code == 3 and err.splitlines()[-1].startswith("  next: holdfast ckpt repair")


def test_a_step_that_is_not_there_is_said_with_those_that_are(root: Path, tmp_path: Path) -> None:
    with pytest.raises(NothingToResume, match=r"no attempt of step 7; there are 30, 20, 10\n"):
        resolve(f"{root}@7")
    for step in range(100, 110):
        (tmp_path / save_id(step).directory()).mkdir()
    with pytest.raises(NothingToResume, match=r"there are 109, .*, 102 and 2 more\n"):
        resolve(f"{tmp_path}@7")


def test_a_place_whose_name_ends_like_a_step(root: Path, tmp_path: Path) -> None:
    odd = tmp_path / "r@5"
    root.rename(odd)
    assert find(odd).path.name == find(str(odd)).path.name == save_id(10).directory()
    assert find(f"{odd}@10").path.name == save_id(10).directory()
    with pytest.raises(UsageError, match=r"r does not exist"):
        find(tmp_path / "r@6")


def test_a_link_to_a_root_is_one(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to(root)
    assert find(tmp_path / "link").path.name == save_id(10).directory()
    assert run(capsys, "ls", str(tmp_path / "link"))[0] == 0


def test_a_checkpoint_is_no_root(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / save_id(10).directory()
    path.rename(tmp_path / "renamed")
    for wrong in (tmp_path / "renamed", root / save_id(20).directory()):
        for command in (["ls"], ["prune", "--keep", "1"]):
            code, _, err = run(capsys, command[0], str(wrong), *command[1:])
            assert code == 2 and "is a checkpoint" in err and f"holdfast ckpt ls {wrong.parent}" in err


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "-5", "-0.1"])
def test_a_grace_that_protects_nothing_is_refused(
    root: Path, capsys: pytest.CaptureFixture[str], number: str
) -> None:
    before = sorted(root.iterdir())
    code, _, err = run(capsys, "prune", str(root), "--keep", "1", "--grace-s", number)
    assert code == 2 and number in err and "--grace-s" in err and sorted(root.iterdir()) == before


@pytest.mark.parametrize(
    ("text", "size"),
    [("1KB", 1000), ("1kB", 1000), ("1k", 1000), ("1 kb", 1000), ("2MB", 2_000_000), ("5gb", 5 * 10**9),
     ("1.5GB", 1_500_000_000), ("1KiB", 1024), ("2mib", 2 * 1024**2), ("4GiB", 4 * 1024**3), ("1T", 10**12),
     ("100B", 100), ("100", 100), (" 7 b ", 7)],
)  # fmt: skip
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5iB", "5XB", "0", "-1GB", "1e9", "5 G B", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a size"):
        size_bytes(text)


@pytest.mark.parametrize("name", ["my model.safetensors", "été", "x" * 200, "a:b;c&d'e"])
def test_an_output_has_the_name_that_the_user_gives_it(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, out, err = run(capsys, "merge", f"{root}@10", str(tmp_path / name))
    assert code == 0 and out == f"{tmp_path / name}\n", err
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["root", name])


def test_an_output_whose_name_cannot_be_shown_is_refused(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a\nb", "a\x1b[31m", "a\udcff"):
        code, _, err = run(capsys, "merge", f"{root}@10", str(tmp_path / name))
        assert code == 3 and "next: " in err and [p.name for p in tmp_path.iterdir()] == ["root"]


def test_a_place_that_is_no_text_is_said_as_well_as_it_can_be(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / os.fsdecode(b"\xff")
    odd.mkdir()
    code, out, _ = run(capsys, "merge", "--json", f"{root}@10", str(odd / "all.safetensors"))
    assert code == 0 and json.loads(out) == [f"{tmp_path}/\\udcff/all.safetensors"]
    for command in (["ls"], ["show"], ["verify"], ["prune", "--keep", "1"]):
        code, out, err = run(capsys, *command, "--json", str(odd))
        assert (code, out) == (2, "") and "is no valid Unicode" in err and "  next: rename it" in err


def test_commands_to_copy_are_quoted(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = tmp_path / "my root"
    root.rename(odd)
    save(odd, WORLD, save_id(50), copies=2)
    damaged = odd / save_id(50).directory()
    flip(damaged / "copy-catalogue.json", 60)
    whole = shlex.quote(str(odd))
    for command in (
        ["verify", str(damaged)], ["verify", f"{odd}@7"], ["verify", str(odd / save_id(20).directory())],
        ["repair", f"{odd}@20"], ["ls", str(damaged)],
    ):  # fmt: skip
        _, out, err = run(capsys, *command)
        (line,) = [line for line in (out + err).splitlines() if line.startswith("  next: ")]
        assert line.count("my root") == line.count(f"{whole[:-1]}/") + line.count(whole), line


def test_a_file_is_no_checkpoint(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.pt").write_bytes(b"x")
    for command in (["ls"], ["show"], ["verify"], ["prune", "--keep", "1"]):
        code, _, err = run(capsys, command[0], str(tmp_path / "a.pt"), *command[1:])
        assert code == 2 and "a.pt is a file" in err and "next: " in err
    code, _, err = run(capsys, "verify", str(shard(root, 10)))
    assert code == 2 and f"next: name its directory: {shard(root, 10).parent}" in err


def test_a_directory_in_place_of_a_file_is_told_with_what_to_do(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(root, WORLD, save_id(50), copies=2)
    path = root / save_id(50).directory()
    (path / "copy-catalogue.json").unlink()
    (path / "copy-catalogue.json").mkdir()
    code, _, err = run(capsys, "repair", str(path))
    assert code == 3 and "Is a directory" in err and "next: a directory has the name of this file" in err


def test_prune_says_why_something_stays(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "prune", str(root), "--keep", "9", "--dry-run")
    assert code == 0 and out.splitlines()[-1] == f"nothing to remove below {root}"
    save(root, WORLD, save_id(5, run="other"))
    code, out, _ = run(capsys, "prune", str(root), "--keep", "1", "--grace-s", "60")
    (line,) = [line for line in out.splitlines() if save_id(5, run="other").directory() in line]
    assert (
        code == 0
        and line.startswith("spared")
        and line.endswith("the newest of its run, and younger than 60 s")
    )


def test_outputs_are_as_the_umask_says(root: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        assert answer(["ckpt", "merge", f"{root}@10", str(tmp_path / "one")]) == 0
        assert (
            answer(["ckpt", "merge", f"{root}@10", str(tmp_path / "parts"), "--max-shard-size", "100"]) == 0
        )
    finally:
        os.umask(before)
    made = [tmp_path / "one", *(tmp_path / "parts").iterdir()]
    assert len(made) > 3 and {path.stat().st_mode & 0o777 for path in made} == {0o640}
    assert (tmp_path / "parts").stat().st_mode & 0o777 == 0o750


def test_nothing_is_no_place(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="empty text"):
        place_of("")
    assert place_of(Path()) == place_of(".") == Path()
    for command in (["ls", ""], ["verify", ""], ["prune", "", "--keep", "1"]):
        code, _, err = run(capsys, *command)
        assert code == 2 and "next: write a directory" in err


def test_a_listing_has_age_and_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.utime(root / save_id(10).directory(), (time.time() - 7200,) * 2)
    head, *rows = run(capsys, "ls", str(root))[1].splitlines()
    assert head.split()[:4] == ["step", "age", "run", "checkpoint"]
    assert "  2 h 0 min  " in rows[2] and save_id(10).run in rows[2].split()


def test_values_are_shown_by_dotted_name_and_tensors_summed_up() -> None:
    values: dict[str, object] = {
        "optimizers": {
            "default": {
                "groups": [{"lr": 0.01, "betas": (0.9, 0.999), "foreach": None}],
                "members": [["w"]],
                "state": {"w": {"step": {"@": "tensor", "v": "x"}}},
            }
        },
        "session": {"step": 20, "place": {"epoch": 3}},
        "weights": {"@": "tensor", "v": "y"},
        "state": {"history": list(range(1000)), "note": "n" * 100},
    }
    assert readable(values) == {
        "optimizers.default.groups.0.lr": "0.01",
        "optimizers.default.groups.0.betas": "(0.9, 0.999)",
        "session.step": "20",
        "session.place.epoch": "3",
        "state.history": "1,000 items",
        "state.note": "n" * 57 + "...",
    }


def test_a_checkpoint_is_shown_with_totals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = replicated(1, {"a": np.zeros(3), "b": np.zeros((2, 2)), "c": np.zeros(5, np.float32)})
    save(tmp_path, world, save_id(1))
    lines = run(capsys, "show", str(tmp_path))[1].splitlines()
    assert "total F64: 2 tensors, 7 elements, 56 B" in lines
    assert "total F32: 1 tensor, 5 elements, 20 B" in lines
    shown = json.loads(run(capsys, "show", str(tmp_path), "--json")[1])
    assert shown["totals"]["F64"] == {"tensors": 2, "elements": 7, "size_bytes": 56}
