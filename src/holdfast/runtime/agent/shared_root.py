"""The common place for the checkpoints of all nodes: its default, and the test that every node reaches it."""

from __future__ import annotations

from pathlib import Path

from holdfast.runtime.node.run_settings import RunSettings, without_launch
from holdfast.runtime.node.rundir import RunDir, probe_path, write_private
from holdfast.store.backends.location import place_of


def share_checkpoints(run: RunDir, job: str) -> None:
    """Make the default directory for checkpoints: common to all nodes, named by the job, beside the run directories."""
    common = run.path.parent / f"{without_launch(job)}.checkpoints"
    common.mkdir(mode=0o700, exist_ok=True)
    if run.checkpoints.is_symlink() and run.checkpoints.readlink() != common:
        run.checkpoints.unlink()  # of a job that ended before this node had a vote in it
    if not run.checkpoints.exists():
        run.checkpoints.symlink_to(common)


def leave_probe(root: str, settings: RunSettings) -> None:
    """Write a probe file that shows that this node reaches ``root``.

    An unwritable root is reported at the first save.
    """
    place = place_of(root)
    if not root or not isinstance(place, Path):  # a bucket is the same on all nodes
        return
    try:
        write_private(probe_path(root, settings.job_id, settings.node), b"")
    except OSError:
        return


def is_there(probe: Path) -> bool:
    """Return True if this node sees ``probe``; False also without permission or while the storage does not answer."""
    try:
        return probe.exists()
    except OSError:
        return False
