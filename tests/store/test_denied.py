"""Files that cannot be read now do not count as damaged: missing rights, no free descriptor, a lost file server."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.cli.main import answer
from holdfast.errors import StoreDenied, StoreUnreachable
from holdfast.store.manage.checkpoint_root import Root, find
from holdfast.store.manage.repair import repair
from holdfast.store.read.load import load_values
from holdfast.store.read.validation import inspect
from tests.store.rights import of_the_modes
from tests.store.test_repair import contents
from tests.store.worlds import random_array, replicated, save, save_id

WORLD = replicated(2, {"w": random_array((40, 30), "float32", 1)})
FILES = ("", "catalogue.json", "rank-r00001.json", "shard-r00000-000.safetensors", "SEALED")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Save steps 10 and 20, with two copies of everything."""
    for step in (10, 20):
        save(tmp_path / "root", WORLD, save_id(step), copies=2)
    return tmp_path / "root"


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_may_not_be_read_stops_a_load_and_is_left_alone(root: Path, name: str) -> None:
    newest = root / save_id(20).directory()
    before, mode = contents(newest), (newest / name).stat().st_mode
    (newest / name).chmod(0)
    asks: list[Callable[[], object]] = [lambda: inspect(newest), lambda: repair(newest), lambda: find(root)]
    if name != "SEALED":  # only judgements of a checkpoint read SEALED
        asks.append(lambda: load_values(newest))
    with of_the_modes():
        for ask in asks:
            with pytest.raises(StoreDenied, match="Permission denied") as caught:
                ask()
            assert str(newest / name) in caught.value.message
            assert (
                f"runs as uid {os.geteuid()}" in caught.value.message and "mode 0000" in caught.value.message
            )
            assert "chown" in caught.value.hint and "chmod" in caught.value.hint
        found = Root(root).list()
        pruned = Root(root).prune(1, grace_s=0)
    assert [(v.step, v.valid, v.denied) for v in found] == [(20, False, True), (10, True, False)]
    assert not pruned.removed and "Permission denied" in pruned.spared[newest.name]
    (newest / name).chmod(mode)
    assert contents(newest) == before and Root(root).newest_valid().require().step == 20


def test_a_root_that_may_not_be_read(root: Path) -> None:
    root.chmod(0)
    inside = root / save_id(20).directory()
    with of_the_modes():
        for spec in (root, f"{root}@20", inside):
            with pytest.raises(StoreDenied, match="mode 0000") as caught:
                find(spec)
                load_values(inside)
            assert str(root) in caught.value.message
    root.chmod(0o700)
    assert find(root).path == inside


@pytest.mark.parametrize("command", [["verify"], ["show"], ["repair"], ["repair", "--dry-run"], ["holders"]])
@pytest.mark.parametrize("place", ["", save_id(20).directory()], ids=["root", "attempt"])
def test_commands_say_so(
    root: Path, capsys: pytest.CaptureFixture[str], command: list[str], place: str
) -> None:
    shard = root / save_id(20).directory() / "shard-r00000-000.safetensors"
    shard.chmod(0)
    with of_the_modes():
        code = answer(["ckpt", command[0], str(root / place), *command[1:]])
    printed = capsys.readouterr()
    assert code == 3 and not printed.out, printed
    assert f"error: cannot read {shard}: Permission denied" in printed.err
    assert "next: run as the user whose file it is" in printed.err and "ckpt repair" not in printed.err


def test_ls_lists_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / save_id(20).directory()).chmod(0)
    with of_the_modes():
        assert answer(["ckpt", "ls", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "unreadable" in lines[1] and "Permission denied" in lines[1]
    assert "sealed" in lines[2]


def test_no_descriptor_left_is_no_damage(root: Path) -> None:
    newest = root / save_id(20).directory()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, limits[1])
        )
        _open_all(stack, spare=1)
        with pytest.raises(StoreUnreachable, match="Too many open files") as caught:
            Root(root).newest_valid()
    assert "ulimit -n" in caught.value.hint and Root(root).newest_valid().require().path == str(newest)


def _open_all(stack: ExitStack, spare: int) -> None:
    """Use up the descriptors of this process except ``spare``."""
    held: list[int] = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        pass
    for fd in held[:spare]:
        os.close(fd)
    for fd in held[spare:]:
        stack.callback(os.close, fd)


def test_a_file_system_whose_server_is_gone_is_no_damage(tmp_path: Path) -> None:
    place = tmp_path / "mounted"
    place.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"no file systems of processes here: {error}")
    told = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
    mounted = libc.mount(b"none", os.fsencode(place), b"fuse", 0, told)
    os.close(fd)  # no process serves it now
    if mounted != 0:
        pytest.skip(f"mounting is not allowed here: {os.strerror(ctypes.get_errno())}")
    try:
        for ask in (lambda: Root(place).newest_valid(), lambda: find(place)):
            with pytest.raises(StoreUnreachable, match="not connected") as caught:
                ask()
            assert "mounted" in caught.value.hint
    finally:
        libc.umount2(os.fsencode(place), 2)
