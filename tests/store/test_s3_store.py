"""Checkpoints in a bucket: a real server, cut connections, killed writers, races of readers and removers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from holdfast.core.ids import NodeId, SaveId
from holdfast.core.protocol.peer_messages import Claim
from holdfast.errors import (
    CheckpointInvalid,
    HoldfastError,
    NothingToResume,
    StoreUnreachable,
    StoreWriteError,
    UsageError,
)
from holdfast.runtime.agent.leader_election import claim_once
from holdfast.store.backends import s3_store
from holdfast.store.backends.location import Place, Url, place_of
from holdfast.store.backends.registry import open_attempt, open_store
from holdfast.store.backends.s3_client import PART_SIZE_BYTES, Bucket
from holdfast.store.backends.s3_store import S3Store
from holdfast.store.layouts.save_plan import plan
from holdfast.store.manage.checkpoint_root import Root, resolve
from holdfast.store.read.load import load_into
from holdfast.store.read.validation import inspect
from holdfast.store.write.async_save import BackgroundSaver
from holdfast.store.write.writer import WrittenShare
from tests.store.limits import no_threads
from tests.store.s3server import ACCESS, SECRET, Proxy, environment, long, refusing
from tests.store.worlds import World, pipeline, random_array, replicated, save, save_id

REPOSITORY = Path(__file__).parents[2]
WORLD = pipeline(edge=8)


def large(step: int = 0) -> World:
    """Return a job of one rank with one tensor of one and a half upload parts."""
    return replicated(1, {"a": random_array((PART_SIZE_BYTES * 3 // 8,), "float32", step)})


def check(world: World, path: Place | str) -> None:
    """Check that every rank loads exactly its part."""
    for rank in range(world.size):
        state = world.state(rank, empty=True)
        load_into(path, state.targets(), known=list(world.arrays))
        world.check(state)


def keys(root: Url) -> list[str]:
    """Return all objects below a root."""
    return sorted(e.key for name in ("", ".leases", ".removing") for e in Bucket(root).entries(name))


def test_save_list_load_prune(bucket: Url) -> None:
    root = Root(bucket)
    assert root.names() == [] and root.newest_valid().chosen is None
    with pytest.raises(NothingToResume, match="no attempt at all"):
        resolve(bucket)
    for step in (10, 20, 30):
        written = save(bucket, WORLD, save_id(step))
        assert [one.sealed for one in written] == [False] * 3 + [True]
    found = root.list(deep=True)
    assert [(v.step, v.valid, v.sealed, v.deep, v.damage) for v in found] == [
        (step, True, True, True, ()) for step in (30, 20, 10)
    ]
    assert found[0].path == f"{bucket}/{save_id(30).directory()}" and found[0].name == save_id(30).directory()
    assert resolve(f"{bucket}@20") == resolve(found[1].path) == place_of(found[1].path)
    check(WORLD, resolve(bucket))
    assert root.prune(1).removed == (found[1].name, found[2].name)
    assert [v.step for v in root.list()] == [30]
    assert all(key.startswith(found[0].name) for key in keys(bucket)), "no leases, marks or probes are left"


def test_the_same_save_again_is_compared(bucket: Url) -> None:
    save(bucket, WORLD, save_id())
    before = {e.key: e.modified for e in Bucket(bucket).entries("")}
    assert save(bucket, WORLD, save_id())[-1].sealed
    assert {e.key: e.modified for e in Bucket(bucket).entries("")} == before
    other = World(
        WORLD.size, {f: random_array(a.shape, a.dtype.name, 99) for f, a in WORLD.arrays.items()}, WORLD.held
    )
    with pytest.raises(StoreWriteError, match="other content under this save id"):
        save(bucket, other, save_id())
    with pytest.raises(StoreWriteError, match="another catalogue"):
        save(bucket, pipeline(edge=9), save_id())
    check(WORLD, resolve(bucket))


def test_large_files_go_up_in_parts_and_come_back_in_ranges(bucket: Url) -> None:
    world = large()
    save(bucket, world, save_id(), threads=4)
    check(world, resolve(bucket))
    assert inspect(resolve(bucket), deep=True).valid
    shards = [e for e in Bucket(bucket).entries("") if e.key.endswith(".safetensors")]
    assert [e.size_bytes > PART_SIZE_BYTES for e in shards] == [True]


def test_create_never_replaces(bucket: Url) -> None:
    with open_store(bucket).create("x") as attempt:
        assert attempt.create("one", b"1", "r0") and not attempt.create("one", b"2", "r1")
        assert attempt.read("one", 10) == b"1" and attempt.names() == ["one"]
        attempt.write("one", b"3", "r0")
        assert attempt.read("one", 10) == b"3"
        with pytest.raises(CheckpointInvalid, match="the limit is 0"):
            attempt.read("one", 0)
        with pytest.raises(CheckpointInvalid, match=r"x/two: does not exist"):
            attempt.read("two", 10)


def test_an_upload_that_fails_leaves_nothing(bucket: Url) -> None:
    with open_store(bucket).create("x") as attempt:
        for size_bytes in (10, 2 * PART_SIZE_BYTES):
            data = memoryview(bytes(size_bytes))
            with pytest.raises(KeyError), attempt.new_file("f", "r0", size_bytes=size_bytes) as put:
                put(0, data)
                raise KeyError
            with pytest.raises(StoreWriteError, match="does not follow"):
                with attempt.new_file("f", "r0", size_bytes=size_bytes) as put:
                    put(1, data)
        assert attempt.names() == []


def test_damage_is_found_and_the_older_one_is_taken(bucket: Url) -> None:
    world = replicated(1, {"a": random_array((9, 9), "float32", 1)})
    save(bucket, world, save_id(10))
    save(bucket, world, save_id(20))
    newest, objects = resolve(bucket), Bucket(bucket)
    with open_attempt(newest) as attempt:
        content = {name: attempt.read(name, 2**20) for name in attempt.names()}
        for name, data in content.items():
            if name == "SEALED":
                continue
            objects.delete([f"{newest.name}/{name}"])
            assert Root(bucket).newest_valid().require().step == 10, name
            attempt.write(name, data[:-1], "test")
            assert Root(bucket).newest_valid().require().step == 10, name
            attempt.write(name, data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], "test")
            assert Root(bucket).newest_valid(deep=True).require().step == 10, name
            attempt.write(name, data, "test")
    assert inspect(newest, deep=True).damage == ()


def test_a_reader_holds_what_it_reads(bucket: Url, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20):
        save(bucket, WORLD, save_id(step))
    name = save_id(10).directory()
    with open_attempt(bucket / name) as reader:
        assert reader.hold()
        assert Root(bucket).prune(1).spared == {name: "is being read or written"}
        assert name in Root(bucket).names()
        monkeypatch.setattr(s3_store, "LEASE_EXPIRY_S", -1.0)
        assert Root(bucket).prune(1).removed == (name,)
        assert keys(bucket) and not any(".leases" in key for key in keys(bucket))
    assert Root(bucket).names() == [save_id(20).directory()]


def test_a_lease_is_renewed(bucket: Url, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_store, "LEASE_RENEW_S", 0.05)
    with open_store(bucket).create("x") as attempt:
        assert attempt.hold()
        (first,) = Bucket(bucket).entries(".leases/x")
        deadline_s = time.monotonic() + 30
        while Bucket(bucket).entries(".leases/x")[0].modified == first.modified:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
    assert Bucket(bucket).entries(".leases") == []


def test_a_lease_that_cannot_be_renewed_is_taken_back(bucket: Url) -> None:
    with open_store(bucket).create("x") as attempt:
        with no_threads(), pytest.raises(RuntimeError, match="start new thread"):
            attempt.hold()
        assert Bucket(bucket).entries(".leases") == []
        assert attempt.hold() and len(Bucket(bucket).entries(".leases")) == 1


def test_an_interrupted_removal_is_hidden_refused_and_finished(bucket: Url) -> None:
    for step in (10, 20):
        save(bucket, WORLD, save_id(step))
    name = save_id(10).directory()
    Bucket(bucket).put(f".removing/{name}", b"")
    assert Root(bucket).names() == [save_id(20).directory()]
    with pytest.raises(CheckpointInvalid, match="is being removed"):
        check(WORLD, bucket / name)
    with pytest.raises(StoreWriteError, match="is being removed"):
        save(bucket, WORLD, save_id(10))
    assert Root(bucket).prune(3).removed == ()
    assert not any(name in key for key in keys(bucket))


def test_removal_takes_the_proofs_first(bucket: Url, monkeypatch: pytest.MonkeyPatch) -> None:
    save(bucket, WORLD, save_id())
    order: list[str] = []
    real = Bucket.delete

    def delete(self: Bucket, gone: list[str]) -> None:
        order.extend(key.rpartition("/")[2] for key in gone)
        real(self, gone)

    monkeypatch.setattr(Bucket, "delete", delete)
    assert S3Store(bucket).remove(save_id().directory())
    kinds = [name.partition("-")[0] for name in order]
    assert kinds[0] == "SEALED" and kinds.index("shard") > max(
        i for i, kind in enumerate(kinds) if kind in ("rank", "catalogue.json")
    )


@long
def test_readers_and_removers_race(bucket: Url) -> None:
    """A reader that has opened a checkpoint reads all of it, whatever a remover does at the same time."""
    results: list[str] = []

    def read(path: Place) -> None:
        try:
            check(WORLD, path)
        except CheckpointInvalid as error:
            results.append("refused" if "being removed" in error.message else error.message)
        else:
            results.append("read")

    save(bucket, WORLD, save_id(100))
    for step in range(3):
        save(bucket, WORLD, save_id(step))
        readers = [
            threading.Thread(target=read, args=(bucket / save_id(step).directory(),)) for _ in range(3)
        ]
        remover = threading.Thread(target=lambda: Root(bucket).prune(1))
        for thread in (*readers, remover):
            thread.start()
        for thread in (*readers, remover):
            thread.join()
    gone = {r for r in results if "does not exist" in r or "no rank has finished" in r}
    assert len(results) == 9 and set(results) - gone <= {"read", "refused"}
    assert "read" in results and not [r for r in gone if "shard" in r], "a reader lost files on the way"


JOB = """
import sys
from holdfast.store.manage.checkpoint_root import Root
from tests.store.worlds import pipeline, save, save_id
root, run, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
for step in range(first, first + 4):
    save(root, pipeline(edge=8), save_id(step, run=run))
    Root(root).prune(1)
"""


def child(script: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a process that runs ``script``."""
    path = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@long
@pytest.mark.processes
def test_two_jobs_save_and_prune_in_one_root(bucket: Url) -> None:
    jobs = [child(JOB, str(bucket), run, first) for run, first in (("ahead", "1000"), ("behind", "1"))]
    for job in jobs:
        _, errors = job.communicate(timeout=100)
        assert job.returncode == 0, errors
    newest = {
        run: Root(bucket).newest_valid(run=run, deep=True).require().step for run in ("ahead", "behind")
    }
    assert newest == {"ahead": 1003, "behind": 4}
    check(WORLD, bucket / save_id(4, run="behind").directory())


WRITER = """
import sys
from tests.store.test_s3_store import large
from tests.store.worlds import save, save_id
save(sys.argv[1], large(2), save_id(2))
"""


@long
@pytest.mark.processes
def test_a_writer_killed_in_the_middle_of_an_upload(s3_url: str, bucket: Url) -> None:
    save(bucket, large(1), save_id(1))
    with Proxy(s3_url) as proxy:
        proxy.delay_s = 0.01
        for part in (0.2, 1.2):
            writer = child(WRITER, str(bucket), env=environment(proxy.url))
            goal = proxy.passed_size_bytes + part * PART_SIZE_BYTES
            while proxy.passed_size_bytes < goal:
                assert writer.poll() is None, "it should not have finished yet"
                time.sleep(0.005)
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
            choice = Root(bucket).newest_valid(deep=True)
            assert choice.require().step == 1
            check(large(1), choice.require().path)
    save(bucket, large(2), save_id(2))
    assert Root(bucket).newest_valid(deep=True).require().step == 2
    check(large(2), resolve(bucket))


@long
@pytest.mark.processes
def test_a_killed_writer_process_is_replaced(
    s3_url: str, bucket: Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = large(1)
    catalogue, results, done = world.catalogue(), [], threading.Event()

    def told(_: SaveId, result: WrittenShare | HoldfastError) -> None:
        results.append(result)
        done.set()

    with Proxy(s3_url) as proxy:
        proxy.delay_s = 0.005
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with BackgroundSaver(told) as saver:
            shares = plan(catalogue, frozenset({0}))
            with in_the_middle(proxy, lambda: os.kill(saver.writer_pid, signal.SIGKILL)):
                saver.save(bucket, save_id(1), catalogue, shares, 0, world.state(0), {}, {0: {}})
            assert not done.is_set() and done.wait(60)
        assert [isinstance(result, WrittenShare) and result.sealed for result in results] == [True]
        check(world, resolve(bucket))


@contextlib.contextmanager
def in_the_middle(proxy: Proxy, action: Callable[[], None]) -> Iterator[None]:
    """Run ``action`` when the block has uploaded one part and a little more. Raise an error if it never did."""
    goal = proxy.passed_size_bytes + PART_SIZE_BYTES * 9 // 8

    def wait() -> None:
        deadline_s = time.monotonic() + 60
        while proxy.passed_size_bytes < goal:
            assert time.monotonic() < deadline_s, "so much was never sent"
            time.sleep(0.002)
        action()

    with ThreadPoolExecutor(1) as pool:
        acted = pool.submit(wait)
        yield
        acted.result()


@pytest.mark.more
def test_a_server_that_goes_away_and_comes_back(
    s3_url: str, bucket: Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server is back soon, the save continues.

    Otherwise it fails by name, leaves nothing, and the next one succeeds.
    """
    with Proxy(s3_url) as proxy:
        proxy.delay_s = 0.005
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)

        def blink() -> None:
            proxy.down()
            proxy.turn_away()
            proxy.up()

        with in_the_middle(proxy, blink):
            save(bucket, large(1), save_id(1))
        assert Root(bucket).newest_valid(deep=True).require().step == 1

        monkeypatch.setenv("HOLDFAST_S3_RETRY_S", "0.5")
        with in_the_middle(proxy, proxy.down):
            with pytest.raises(StoreWriteError, match=r"cannot write s3://.*retries") as caught:
                save(bucket, large(2), save_id(2))
        assert "AWS_ENDPOINT_URL" in caught.value.hint
        for ask in (Root(bucket).list, lambda: inspect(bucket / "x")):
            with pytest.raises(StoreUnreachable):
                ask()
        proxy.up()
        choice = Root(bucket).newest_valid(deep=True)
        assert choice.require().step == 1 and [v.step for v in choice.rejected] == [2]
        save(bucket, large(3), save_id(3))
        check(large(3), resolve(bucket))


def test_an_answer_cut_in_the_middle(s3_url: str, bucket: Url, monkeypatch: pytest.MonkeyPatch) -> None:
    save(bucket, large(1), save_id(1))
    with Proxy(s3_url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.answers, proxy.after_size_bytes = 3, 1_000_000
        check(large(1), resolve(bucket))
        assert proxy.answers == 0


def test_a_bucket_is_a_witness(s3_url: str, bucket: Url, monkeypatch: pytest.MonkeyPatch) -> None:
    """If two nodes lose each other, the first one to claim continues. Every later claim gets the same answer."""
    first, second = Claim(1, (NodeId("a"),)), Claim(1, (NodeId("b"),))
    assert claim_once(bucket, "job", first) == claim_once(bucket, "job", second) == ("a",)
    assert claim_once(bucket, "other", second) == ("b",)
    assert claim_once(bucket, "job", Claim(2, (NodeId("b"),))) == ("b",)
    assert Root(bucket).names() == []
    with Proxy(s3_url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.replace = (b"if-none-match", b"x-ignored-hdr")
        assert claim_once(bucket, "third", first) == ()


def test_who_may_only_read_can(s3_url: str, bucket: Url, monkeypatch: pytest.MonkeyPatch) -> None:
    save(bucket, WORLD, save_id())
    with Proxy(s3_url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.read_only = True
        check(WORLD, resolve(bucket))
        for act in (open_store(bucket).probe, lambda: save(bucket, WORLD, save_id(2))):
            with pytest.raises(StoreWriteError, match="403"):
                act()
        assert [v.valid for v in Root(bucket).list(deep=True)] == [True]


def test_a_server_without_conditions_is_refused(
    s3_url: str, bucket: Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(bucket).probe()
    with Proxy(s3_url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.replace = (b"if-none-match", b"x-ignored-hdr")
        with pytest.raises(StoreWriteError, match="ignores If-None-Match"):
            open_store(bucket).probe()
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_url)
    assert keys(bucket) == []


def test_no_bucket_no_server_no_rights(bucket: Url, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = Url.parse("s3://no-such-bucket/x")
    for ask in (open_store(nowhere).probe, Root(nowhere).names):
        with pytest.raises((StoreWriteError, StoreUnreachable), match="NoSuchBucket") as caught:
            ask()
        assert "make the bucket first" in caught.value.hint
    body = f"<?xml version='1.0'?><Error><Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>{ACCESS}</AWSAccessKeyId>"
    url, listener = refusing(f"{body}<StringToSign>{SECRET}</StringToSign></Error>".encode())
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    for ask in (open_store(bucket).probe, Root(bucket).names):
        with pytest.raises(
            (StoreWriteError, StoreUnreachable), match=r"403.*SignatureDoesNotMatch"
        ) as denied:
            ask()
        assert "AWS_SECRET_ACCESS_KEY" in denied.value.hint
        assert denied.value.__cause__ is None and denied.value.__suppress_context__
        assert SECRET not in str(denied.value) and ACCESS not in str(denied.value)
    listener.close()


@pytest.mark.parametrize(
    "text",
    [
        f"s3://{ACCESS}:{SECRET}@bucket/prefix", f"s3://{ACCESS}@bucket", f"s3://bucket/a?X-Amz-Signature={SECRET}",
        f"s3://bucket/{SECRET}#x", f"gs://{SECRET}/x", "s3://", "s3://bucket//x", "s3://bucket/../x", "s3://bucket/a b",
        "S3://bucket:9000/x", "s3:/bucket/x",
    ],
)  # fmt: skip
def test_urls_that_are_refused_and_not_repeated(text: str) -> None:
    for act in (place_of, open_store, Root, resolve):
        with pytest.raises(UsageError) as caught:
            act(text)
        assert SECRET not in str(caught.value) and ACCESS not in str(caught.value)


def test_a_url_is_a_place() -> None:
    url = Url.parse("S3://bucket/a/b/")
    assert (str(url), url.name, str(url.parent), str(url / "c")) == (
        "s3://bucket/a/b",
        "b",
        "s3://bucket/a",
        "s3://bucket/a/b/c",
    )
    assert place_of("dir/x") == Path("dir/x") and place_of(url) == place_of(str(url))
    with pytest.raises(TypeError):
        os.fspath(url)  # type: ignore[call-overload]


@pytest.mark.parametrize("text", ["abc", "-1", "nan", "inf", "1e9"])
def test_a_time_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HOLDFAST_S3_RETRY_S", text)
    with pytest.raises(UsageError, match=f"HOLDFAST_S3_RETRY_S={text} is no number") as caught:
        open_store("s3://bucket/x")
    assert "HOLDFAST_S3_RETRY_S=60" in caught.value.hint


@pytest.mark.parametrize(
    "url",
    [
        "http://fd00::2:9000",
        "http://[fd00::2",
        "http://[fe80::1%eth0]:9000",
        "http://[host]:1",
        "host:9000",
        "http://",
    ],
)
def test_an_endpoint_that_is_no_url_is_refused(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """obstore panics on some texts, with an exception that `except Exception` does not catch."""
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    with pytest.raises(UsageError, match=r"AWS_ENDPOINT_URL=.* is no URL of a server") as caught:
        open_store("s3://bucket/x")
    assert "http://[fd00::2]:9000" in caught.value.hint


MEMORY = """
import sys, resource
import numpy as np
from holdfast.store.backends.s3_client import Bucket
from holdfast.store.backends.location import Url
bucket = Bucket(Url.parse(sys.argv[1]))
data = np.random.default_rng(0).integers(0, 256, 112 * 2**20, np.uint8)
bucket.put("warm", b"x" * 2**20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with bucket.upload("big", data.nbytes) as put:
    for start in range(0, data.nbytes, 2**23):
        put(start, memoryview(data)[start : start + 2**23])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@long
@pytest.mark.processes
def test_an_upload_needs_bounded_memory(bucket: Url) -> None:
    job = child(MEMORY, str(bucket))
    out, errors = job.communicate(timeout=100)
    assert job.returncode == 0, errors
    assert int(out) < 80 * 2**20
    assert np.isclose([e.size_bytes for e in Bucket(bucket).entries("") if e.key == "big"], 112 * 2**20)


def test_without_obstore_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    monkeypatch.setenv("AWS_REGION", "nowhere-1")  # a client that was made before is not used
    with pytest.raises(HoldfastError, match="obstore is not installed"):
        open_store("s3://bucket/x")
