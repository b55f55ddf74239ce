"""Library mode over several nodes: each node starts its own agent, and this module lets the agents find each other.

No launcher has given the agents an address or a token. But the ranks can already sum integers over the framework's own
group, so rank 0 sends the address and the token to all ranks in one sum. The token is as protected as the gradients. As
with torchrun, each node must have a block of consecutive ranks, and all blocks must have the same size. The node of a
rank then follows from the number of the rank.

Invariant: every refusal is decided from sums, so all ranks refuse or none does. No rank waits for one that has left.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from holdfast.core.launch_environment import ProcessPlace
from holdfast.core.worker.vote import all_equal
from holdfast.errors import GroupError, UnsupportedError
from holdfast.runtime.net.addresses import endpoint, family_of
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import TOKEN_SIZE_BYTES, RunDir
from holdfast.runtime.node.spawn import free_port

Exchange = Callable[[list[int]], list[int]]
"""A function that returns the element-wise sum of the lists of all ranks, without an agent."""

JOIN_S = 60.0
LATE_S = 5.0  # extra wait in which the agent itself logs that the agents did not meet
POLL_S = 0.05
ADDRESS_SIZE_BYTES = 64
ANY_PORT = 9  # any port will do, because connect() of a UDP socket sends nothing
REMEDY = (
    "start the script on each host with `holdfast run --nnodes N --node-rank K --master-addr HOST0 --token-file FILE "
    "--nproc-per-node M` (docs/several-nodes.md)"
)


class LibraryNodes(NamedTuple):
    """The values with which the agent of a node meets the agents of the other nodes.

    ``number`` and ``address``: number and address of this node. ``total``: number of nodes. ``contact``: "host:port" of
    the agent on rank 0's node. ``token``: token of the job.
    """

    number: int
    total: int
    address: str
    contact: str
    token: bytes


def refuse_unknown(seat: ProcessPlace, *, may_exchange: bool) -> None:
    """Refuse a job of several nodes unless all ranks can exchange sums and the number of ranks per node is known.

    Raises:
        UnsupportedError: the ranks cannot exchange sums, or the number of ranks per node is unknown.
    """
    if may_exchange and seat.local_world_size:
        return
    here = f"{seat.local_world_size} of them" if seat.local_world_size else "an unknown number of them"
    last = (
        "" if seat.local_world_size else "; or set LOCAL_WORLD_SIZE, where you know how many are on each node"
    )
    raise UnsupportedError(
        f"without `holdfast run` this job may have one node: it has {seat.world_size} ranks, {here} on this node "
        f"({seat.said})",
        hint=REMEDY + last,
    )


def agree(seat: ProcessPlace, exchange: Exchange) -> LibraryNodes:
    """Agree with all other ranks on the contact and the token of the job. All ranks call this at the same time.

    Returns:
        The values of this rank's node.

    Raises:
        UnsupportedError: the ranks are not in blocks of one size.
        PeerLost: a rank is gone.
    """
    size, local = seat.world_size, seat.local_world_size
    address, said = "", bytes(TOKEN_SIZE_BYTES + ADDRESS_SIZE_BYTES + 2)
    if seat.rank == 0:
        address = own_address(seat.master)
        port = free_port(address).to_bytes(2)
        said = (
            secrets.token_bytes(TOKEN_SIZE_BYTES) + port + address.encode().ljust(ADDRESS_SIZE_BYTES, b"\0")
        )
    misplaced = seat.rank % local != seat.local_rank
    total, squares, wrong, *words = exchange([local, local * local, int(misplaced), *said])
    if not all_equal(size, total, squares) or size % local or wrong:
        raise UnsupportedError(
            f"without `holdfast run` all nodes must have as many ranks, one after the other; this one has {local} of "
            f"{size} ({seat.said})",
            hint=REMEDY,
        )
    data = bytes(words)
    token, port, text = data[:TOKEN_SIZE_BYTES], data[TOKEN_SIZE_BYTES:][:2], data[TOKEN_SIZE_BYTES + 2 :]
    first = text.rstrip(b"\0").decode()
    return LibraryNodes(
        number=seat.rank // local,
        total=size // local,
        address=address or towards(first),
        contact=endpoint(first, int.from_bytes(port)),
        token=token.hex().encode(),
    )


def own_address(master: str) -> str:
    """Return an address of this host, which is rank 0's node.

    The result is an address of the host name ``master`` if this host has one, otherwise an address of this host's own
    name, otherwise ``127.0.0.1``.
    """
    for name in (master, socket.gethostname()):
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM) if name else []
        except OSError:
            continue
        for _, _, _, _, place in sorted(found):
            try:
                with socket.socket(family_of(str(place[0]))) as probe:
                    probe.bind((place[0], 0))
                return str(place[0])
            except OSError:  # the address of another host
                continue
    return "127.0.0.1"


def towards(address: str) -> str:
    """Return the IP address of this host from which packets to ``address`` would leave."""
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, ANY_PORT))
        return str(probe.getsockname()[0])


def wait_for_job(run: RunDir) -> None:
    """Wait until the agents have met and have given the job its name, which checkpoints carry.

    Raises:
        GroupError: the agents did not meet within ``JOIN_S`` seconds.
    """
    deadline_s = time.monotonic() + JOIN_S + LATE_S
    while not (settings := RunSettings.load(run.path)).job:
        if time.monotonic() > deadline_s:
            raise GroupError(
                f"the agents of {settings.nnodes} nodes did not meet within {JOIN_S:g} s: this is {settings.node} at "
                f"{settings.bind}, the first contact is {settings.contacts[0]}; their events are in {run.journal}",
                hint=f"is that port open between the nodes? Without it: {REMEDY}",
            )
        time.sleep(POLL_S)
