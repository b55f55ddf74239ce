"""On one host only gloo listens on TCP, and only on loopback, whatever address the host's name has."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from holdfast.runtime.node.rundir import SHARED_MEMORY
from tests.session.launch import run_job
from tests.session.listen_job import STEPS

ADDRESS = "10.66.0.1"
INSIDE = (
    f"ip link set lo up && ip addr add {ADDRESS}/8 dev lo && echo {ADDRESS} > /proc/sys/kernel/hostname"
    ' && exec "$@"'
)
HOST = ["unshare", "--uts", "--net", "sh", "-c", INSIDE, "sh"]
"""A host whose name means an address on its network, as servers have it."""
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def can() -> bool:
    """Return whether network namespaces can be made here."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip"))):
        return False
    return subprocess.run([*HOST, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.skipif(not can(), reason="no network namespaces here (root, unshare, ip)")
def test_a_run_on_one_host_listens_at_unix_sockets_and_gloo_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: gloo used the address of the host's name.

    Agent, controller, zygote and survivors had TCP ports on loopback.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    done = run_job(tmp_path, 2, str(Path(__file__).with_name("listen_job.py")), inside=HOST)
    assert done.returncode == 0 and ", 1 fault, 0 steps lost" in done.stdout, done.stdout
    found = (tmp_path / "listeners").read_text().splitlines()
    assert len(found) >= STEPS and all(line.split() for line in found)
    assert {place for line in found for place in line.split()} <= {f"{each}=rank" for each in LOOPBACK}, found
    bound = (tmp_path / "bound").read_text().splitlines()
    assert bound and all(place.startswith(str(SHARED_MEMORY)) for place in bound), bound
    assert not any(Path(place).parent.exists() for place in bound), "they end with the run"
