"""The directory where all nodes save checkpoints: its default, and the probe files that show which nodes reach it."""

from __future__ import annotations

from pathlib import Path

from holdfast.runtime.node.run_settings import RunSettings, without_launch
from holdfast.runtime.node.rundir import RunDir, probe_path, write_private
from holdfast.store.backends.location import place_of


def share_checkpoints(run: RunDir, job: str) -> None:
    """Make the default checkpoint directory, and a link to it in the run directory.

    The checkpoint directory is beside the run directories, and has the name of the job.
    """
    common = run.path.parent / f"{without_launch(job)}.checkpoints"
    common.mkdir(mode=0o700, exist_ok=True)
    if run.checkpoints.is_symlink() and run.checkpoints.readlink() != common:
        run.checkpoints.unlink()  # the link of a job that ended before this node had a vote in it
    if not run.checkpoints.exists():
        run.checkpoints.symlink_to(common)


def leave_probe(root: str, settings: RunSettings) -> None:
    """Write a probe file below ``root``, the place of checkpoints, as a sign that this node reaches ``root``.

    An unwritable ``root`` is ignored here; the first save reports it.
    """
    place = place_of(root)
    if not root or not isinstance(place, Path):  # a bucket is the same on all nodes
        return
    try:
        write_private(probe_path(root, settings.job_id, settings.node), b"")
    except OSError:
        return


def is_there(probe: Path) -> bool:
    """Return True if this node sees the file ``probe``.

    Return False also without permission or if the storage reports an error.
    """
    try:
        return probe.exists()
    except OSError:
        return False
