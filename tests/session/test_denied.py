"""A session whose newest checkpoint is unreadable does not resume from an older one."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import StoreDenied
from holdfast.store.manage.checkpoint_root import Root
from tests.session.test_solo import Job, bare, same
from tests.store.rights import of_the_modes

pytestmark = pytest.mark.torch


def test_no_older_state_is_taken_in_place_of_one_that_may_not_be_read(tmp_path: Path) -> None:
    Job().train(6, checkpoint=tmp_path, save_every_steps=3)
    newest, older = (Path(v.path) for v in Root(tmp_path).list())
    (shard,) = newest.glob("shard-*")
    shard.chmod(0)
    with of_the_modes():
        for resume in ("auto", str(tmp_path), str(newest)):
            with pytest.raises(StoreDenied, match="Permission denied") as caught:
                Job().train(8, checkpoint=tmp_path, resume=resume)
            assert str(shard) in caught.value.message
        assert {v.path for v in Root(tmp_path).list()} == {str(newest), str(older)}
        assert Job().train(4, checkpoint=None, resume=f"{tmp_path}@3") == [3], "one that is named is taken"
    shard.chmod(0o600)
    job = Job()
    assert job.train(8, checkpoint=tmp_path) == [6, 7] and same(job, bare(8))
