"""Values that ranks publish for each other, when the answer does not come."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from holdfast.core.protocol.messages import KvReply
from holdfast.errors import GroupError, ProtocolError, UsageError
from holdfast.frameworks.common.adapter import StateAdapter
from holdfast.runtime.worker.published_values import first_published, published
from holdfast.runtime.worker.worker_client import NO_SAVES, WorkerClient
from holdfast.session.checkpoints import resume
from holdfast.session.checkpoints.job_root import root_of_job
from holdfast.session.loops.loop_bounds import compare_bounds, compare_turns

KEY, WHEN = "holdfast/list", "before rank 0 had published the list"


def client_that_gets(*replies: KvReply) -> WorkerClient:
    """Return a client whose requests get these replies in turn, and then the last one."""

    class Answered:
        rank, generation, saves = 1, "1.1", NO_SAVES

        def __init__(self) -> None:
            self.left = list(replies)

        def kv(self, *_: object, **__: object) -> KvReply:
            return self.left.pop(0) if len(self.left) > 1 else self.left[0]

    return cast(WorkerClient, Answered())


@pytest.mark.parametrize("error", ["timeout", "orphaned", "fenced"])
def test_without_an_answer_nothing_is_compared_and_that_is_told(
    error: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = client_that_gets(KvReply(request_id=1, ok=False, error=error))
    caplog.set_level(logging.WARNING, "holdfast")
    assert root_of_job(client, Path("/ckpts"), later=False) == Path("/ckpts")
    compare_bounds(client, rank=1, world_size=2, loop=0, end=7)
    assert [record.getMessage() for record in caplog.records] == [
        f"holdfast: the places where the ranks save were not compared: {error}",
        f"holdfast: the ends of the ranks' loops were not compared: {error}",
    ]


def test_one_rank_agrees_with_itself() -> None:
    assert first_published(None, KEY, [0, "a"], "the data of the ranks was") == [0, "a"]


def test_another_number_of_values_is_refused() -> None:
    with pytest.raises(ProtocolError, match=KEY):
        first_published(client_that_gets(KvReply(request_id=1, value=b"[1]")), KEY, [1, 2], "nothing was")


def test_other_numbers_of_epochs_are_refused_with_both_numbers() -> None:
    """Regression: the error of a replacement that counts the epochs that are left did not name the other number."""
    client = client_that_gets(KvReply(request_id=1, value=b'["epochs",5]'))
    adapter = cast(StateAdapter, SimpleNamespace(rank=1, world_size=2))
    compare_turns(client, adapter, "0", "epochs", 5)
    said = "epochs has 2 turns on rank 1, and another rank has epochs with 5 turns"
    with pytest.raises(UsageError, match=said) as refused:
        compare_turns(client, adapter, "0", "epochs", 2)
    assert "N - start_epoch" in refused.value.hint


@pytest.mark.parametrize(
    ("error", "cause"), [("fenced", "a recovery began"), ("orphaned", "launcher and agent")]
)
def test_a_wait_that_ends_early_is_a_fault_of_the_job(error: str, cause: str) -> None:
    ended = KvReply(request_id=1, ok=False, error=error)
    for client in (client_that_gets(ended), client_that_gets(KvReply(request_id=1), ended)):
        with pytest.raises(GroupError, match=f"{cause}.* {WHEN}"):
            published(client, KEY, WHEN, wait_s=1.0)


def test_nothing_was_published_in_time() -> None:
    replies = [KvReply(request_id=n, ok=False, error=error) for n, error in enumerate(("timeout", "missing"))]
    assert published(client_that_gets(*replies), KEY, WHEN, wait_s=1.0) == b""


def test_a_recovery_while_the_names_of_tensors_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is there, and the recovery begins before the names in it are read."""
    monkeypatch.setattr(resume, "_built", lambda _: resume._Built(frozenset({"weight"}), frozenset()))
    there, fenced = KvReply(request_id=1, value=b"key "), KvReply(request_id=1, ok=False, error="fenced")
    client = client_that_gets(
        there, there, there, fenced
    )  # check; wait and get of the list; wait of the names
    adapter = cast(StateAdapter, SimpleNamespace(rank=1, world_size=2))
    search = resume.ResumeSearch(adapter, client, lambda numbers: numbers, lambda step: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(GroupError, match="a recovery began while the ranks compared the names"):
        search._names_of_all()
