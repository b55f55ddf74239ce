"""Files that another user could have created are neither used nor changed."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec
import pytest

from holdfast.compat.endpoint import token_path
from holdfast.errors import AuthError, UsageError
from holdfast.runtime.agent.run_rotation import put_aside
from holdfast.runtime.node.file_owners import doubt
from holdfast.runtime.node.process_info import start_ticks
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir, open_log, read_token, write_private
from holdfast.runtime.worker import library_mode
from holdfast.runtime.worker.library_mode import Pointer, _find_agent

STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Make a run directory as from an archive: it belongs to this user, and no process of it runs."""
    run = RunDir(tmp_path / "runs" / "job1")
    run.path.mkdir(parents=True, mode=0o700)
    RunSettings(run_id="job1").save(run.path)
    return run


def test_a_link_to_pages_that_leads_elsewhere_is_removed_alone(run: RunDir, tmp_path: Path) -> None:
    """Regression: all files in the target of the link were removed."""
    victim = tmp_path / "ssh"
    victim.mkdir()
    (victim / "key").write_text("secret")
    for leads_to in (victim, Path("../../ssh")):
        run.pages_link.symlink_to(leads_to)
        run.remove_pages()
        assert not run.pages_link.is_symlink() and (victim / "key").read_text() == "secret"


def test_the_pages_of_another_run_stay(run: RunDir, tmp_path: Path) -> None:
    other = RunDir(tmp_path / "other")
    other.create()
    run.pages_link.symlink_to(other.pages())
    run.remove_pages()
    assert other.pages().is_dir() and any(other.pages().iterdir())
    pages = other.pages()
    other.remove_pages()
    assert not pages.exists() and not other.pages_link.is_symlink()


def test_settings_that_name_another_directory_of_logs_move_nothing(run: RunDir, tmp_path: Path) -> None:
    documents = tmp_path / "documents"
    (tmp_path / "home" / "job1").mkdir(parents=True)
    (tmp_path / "home" / "job1" / "thesis").touch()
    documents.mkdir()
    for named in (documents, tmp_path / "home" / "job1"):
        RunSettings(run_id="job1", log_dir=str(named)).save(run.path)
        aside = put_aside(run, lambda: None)
        assert aside is not None and named.is_dir()
        aside.rename(run.path)
    logs = tmp_path / "logs" / "job1"
    (logs / "attempt-000").mkdir(parents=True)
    RunSettings(run_id="job1", log_dir=str(logs)).save(run.path)
    assert put_aside(run, lambda: None) == run.path.with_name("job1.1")
    assert not any(logs.iterdir()) and (tmp_path / "logs" / "job1.1" / "attempt-000").is_dir()


def test_files_of_others_beside_the_logs_stay(run: RunDir, tmp_path: Path) -> None:
    """Regression: the whole directory of the logs was renamed when the run was started again."""
    logs = tmp_path / "logs" / "job1"
    for name in ("attempt-000", "attempt-001", "attempt-of-mine", "tensorboard"):
        (logs / name).mkdir(parents=True)
        (logs / name / "file").write_text(name)
    (logs / "thesis").touch()
    (logs / "attempt-002").symlink_to(logs / "tensorboard")
    aside = tmp_path / "logs" / "job1.1"
    aside.mkdir()  # from a start that was killed after it had moved one directory
    (logs / "attempt-000").rename(aside / "attempt-000")
    RunSettings(run_id="job1", log_dir=str(logs)).save(run.path)
    earlier = put_aside(run, lambda: None)
    assert earlier is not None and RunSettings.load(earlier).log_dir == str(aside)
    assert sorted(path.name for path in aside.iterdir()) == ["attempt-000", "attempt-001"]
    assert sorted(path.name for path in logs.iterdir()) == [
        "attempt-002",
        "attempt-of-mine",
        "tensorboard",
        "thesis",
    ]


def test_logs_are_not_moved_through_a_link(run: RunDir, tmp_path: Path) -> None:
    logs, elsewhere = tmp_path / "logs" / "job1", tmp_path / "elsewhere"
    (logs / "attempt-000").mkdir(parents=True)
    elsewhere.mkdir()
    (tmp_path / "logs" / "job1.1").symlink_to(elsewhere)
    RunSettings(run_id="job1", log_dir=str(logs)).save(run.path)
    with pytest.raises(OSError, match="is a link"):
        put_aside(run, lambda: None)
    assert not any(elsewhere.iterdir()) and (logs / "attempt-000").is_dir() and run.path.is_dir()


@as_root
def test_a_run_directory_of_another_user_is_refused(run: RunDir) -> None:
    os.chown(run.path, STRANGER, -1)
    with pytest.raises(UsageError, match=f"belongs to the user id {STRANGER}"):
        put_aside(run, lambda: None)
    assert run.path.is_dir()


def test_a_run_directory_that_others_can_write_is_refused(run: RunDir) -> None:
    run.path.chmod(0o777)
    with pytest.raises(UsageError, match=r"can be written by others \(mode 777\)"):
        put_aside(run, lambda: None)


def test_a_link_is_doubted(tmp_path: Path) -> None:
    (tmp_path / "to").symlink_to(tmp_path)
    assert doubt(tmp_path / "to") == "is a link"
    with pytest.raises(FileNotFoundError):
        doubt(tmp_path / "none")


@as_root
def test_an_agent_that_another_user_names_is_not_joined(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Library mode must not trust every pointer file: the agent that it names sets variables of this process."""
    monkeypatch.setattr(library_mode, "JOIN_TIMEOUT_S", 5.0)
    pointer = tmp_path / "pointer.json"
    here = Pointer(str(run.path), os.getpid(), start_ticks(os.getpid()))
    write_private(pointer, msgspec.json.encode(here))
    assert _find_agent(pointer).path == run.path
    for path in (run.path, pointer):
        os.chown(path, STRANGER, -1)
        with pytest.raises(AuthError, match=f"{path.name} belongs to the user id {STRANGER}"):
            _find_agent(pointer)
        os.chown(path, os.geteuid(), -1)


def test_a_log_that_is_a_link_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.log").symlink_to(tmp_path / "profile")
    with pytest.raises(OSError, match="symbolic link"):
        open_log(tmp_path / "rank-00000.log")
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize("text", ["t" * 64, "0123456789abcdef" * 4, "0123456" * 9 + "3", "ab" * 20 + "cdefg"])
def test_a_token_that_can_be_guessed_is_refused(tmp_path: Path, text: str) -> None:
    token = tmp_path / "token"
    write_private(token, text.encode())
    with pytest.raises(AuthError, match="can be guessed"):
        read_token(token)


def test_random_tokens_are_taken(tmp_path: Path) -> None:
    for text in (secrets.token_hex(16), secrets.token_hex(32), secrets.token_urlsafe(32)):
        write_private(tmp_path / "token", text.encode())
        assert read_token(tmp_path / "token") == text.encode()


@pytest.mark.parametrize("made", ["file", "link"])
def test_what_lies_in_the_place_of_the_ttp_secret_is_refused(
    made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a dangling link in the place of the secret gave an untyped exception."""
    monkeypatch.setattr("holdfast.compat.endpoint.SHARED_MEMORY", tmp_path)
    home = tmp_path / f"holdfast-ttp-{os.getuid()}"
    if made == "file":
        home.touch(mode=0o600)
    else:
        home.symlink_to(tmp_path / "none")
    with pytest.raises(UsageError, match="not a private directory"):
        token_path("127.0.0.1", 1)
