"""The flags about the nodes of a job: their number, the number of this node, and the addresses to find the others."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.cli.screen.error_output import say
from holdfast.errors import NotMet, UnsupportedError, UsageError
from holdfast.frame_encryption import require_encryption
from holdfast.runtime.net.addresses import (
    Address,
    address_towards,
    endpoint,
    family_of,
    is_loopback,
    read_endpoint,
    read_host,
)
from holdfast.runtime.net.stream_sockets import dial
from holdfast.runtime.node.interfaces import GLOO, NCCL, interface_of
from holdfast.runtime.node.run_settings import JOIN_S, RunSettings, shape
from holdfast.runtime.node.rundir import read_token
from holdfast.text import plural

DEFAULT_PORT = 29500
NPROC_MAX = 4096
LOOK_S = 1.0
ANSWER_S = 2.0  # a host that is up answers a dial within this time, if only by a refusal
RUN_HELP = "holdfast run --help"
ENCRYPTED = "what Holdfast sends to other hosts is encrypted; what gloo and NCCL send is not"


class NodeFlags(NamedTuple):
    """The checked flags about the nodes of the job."""

    least: int  # nodes that hold ranks
    most: int  # nodes including spares
    number: int  # number of this node; -1: the node has only a name
    node: str  # name of this node
    contacts: tuple[str, ...]  # HOST:PORT that agents dial first
    first_contacts: int  # number of entries of ``contacts`` that are addresses of the first contact
    bind: str  # address of this host that the other hosts reach
    join_s: float  # seconds within which the nodes have to meet

    @property
    def several(self) -> bool:
        """True if more than one node may take part in the job."""
        return self.most > 1


class Contact(NamedTuple):
    """A host that agents dial first: its name, its addresses as resolved on this host, and the port."""

    name: str
    addresses: tuple[str, ...]
    port: int

    @property
    def means_here(self) -> bool:
        """True if this is the name of this host and resolves to loopback here, as on Debian.

        On other hosts such a name resolves to another address.
        """
        return all(map(is_loopback, self.addresses)) and self.name not in (*self.addresses, "localhost")

    def reached(self, bind: str) -> tuple[str, ...]:
        """Return ADDRESS:PORT for each address of the contact.

        If the name is that of this host and resolves to loopback here, return only ``bind`` (the address at which other
        hosts reach this host) with the port.
        """
        hosts = (bind,) if self.means_here else self.addresses
        return tuple(endpoint(host, self.port) for host in hosts)


def read_nodes(values: Mapping[str, Any], given: frozenset[str]) -> NodeFlags:
    """Check the flags about nodes, and return their meaning. ``given`` are the keys of flags that the user has set.

    Raises:
        UsageError: a flag has a value that cannot work.
        NotMet: the name of a host was still unknown after the time limit for the nodes to meet.
    """
    text = str(values["nnodes"])
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None:
        raise UsageError(f"--nnodes {text} is neither a number nor MIN:MAX", hint=RUN_HELP)
    least, most = int(match[1]), int(match[2] or match[1])
    if not 1 <= least <= most:
        raise UsageError(f"--nnodes {text}: 1 <= MIN <= MAX is needed", hint=RUN_HELP)
    number = int(values["node_rank"])
    if not 0 <= number < most:
        raise UsageError(
            f"--node-rank {number} with --nnodes {text}: the numbers are 0 to {most - 1}",
            hint="leave --node-rank out for one node",
        )
    join_s = join_s_of(str(values["rdzv_conf"] or ""))
    if most == 1:
        return NodeFlags(1, 1, 0, "node0", (), 1, "127.0.0.1", join_s)
    node = f"node{number}"
    if "node_rank" not in given and "rdzv_endpoint" in given:
        host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")[:24] or "host"
        number, node = -1, f"{host}-{secrets.token_hex(2)}"
    contacts = [_contact(*place, join_s) for place in _first_places(values, given)]
    if contacts[0].means_here and not values["bind"]:
        raise UsageError(
            f"the host {contacts[0].name} is {contacts[0].addresses[0]} here, an address that no other host reaches",
            hint="--bind ADDRESS: one of this host that the other hosts reach, and which the name means there",
        )
    bind = _bind(values["bind"], contacts[0], join_s)
    reached = [contact.reached(bind) for contact in contacts]
    return NodeFlags(least, most, number, node, sum(reached, ()), len(reached[0]), bind, join_s)


def join_s_of(conf: str) -> float:
    """Return the time limit for the nodes to meet, in seconds, from the value of ``--rdzv-conf``.

    Raises:
        UsageError: the time limit is not a positive finite number.
    """
    pairs = dict(part.strip().partition("=")[::2] for part in conf.split(",") if part.strip())
    text = pairs.get("join_timeout", pairs.get("timeout", str(JOIN_S)))
    try:
        join_s = float(text)
    except ValueError:
        join_s = 0.0
    if not 0.0 < join_s < float("inf"):
        raise UsageError(f"--rdzv-conf {conf}: {text!r} is no number of seconds", hint="join_timeout=600")
    return join_s


def _first_places(values: Mapping[str, Any], given: frozenset[str]) -> list[tuple[str, int]]:
    """Return (host, port) of each contact, a host that agents dial first. Raises: UsageError."""
    asked = str(values["rdzv_endpoint"] or "") if "rdzv_endpoint" in given else ""
    items = [item.strip() for item in asked.split(",") if item.strip()]
    if items:
        return [read_endpoint(item, "--rdzv-endpoint", DEFAULT_PORT) for item in items]
    port = int(values["master_port"] or DEFAULT_PORT)
    if not 0 < port <= 65535:
        raise UsageError(f"--master-port {port} is no port number", hint=f"--master-port {DEFAULT_PORT}")
    return [(read_host(str(values["master_addr"]).strip(), "--master-addr"), port)]


def _contact(host: str, port: int, wait_s: float) -> Contact:
    return Contact(host, _addresses(host, "--master-addr or --rdzv-endpoint", wait_s), port)


def _addresses(host: str, flag: str, wait_s: float) -> tuple[str, ...]:
    """Return the addresses of a host.

    IPv6 addresses are returned only if the host has no IPv4 address. Loopback addresses are returned only if it has no
    others. Link-local addresses of IPv6 are left out, because each host reaches them through another interface. An
    unknown name is looked up again for ``wait_s`` seconds: the pod with this name may not be up yet.
    """
    deadline_s, waiting = time.monotonic() + wait_s, False
    while True:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            break
        except OSError as error:
            why = error.strerror or str(error)
            if time.monotonic() > deadline_s:
                raise NotMet(f"the host {host} is unknown after {wait_s:g} s: {why}",
                             hint=f"check {flag}; the same command tries again") from error  # fmt: skip
        if not waiting:
            waiting = True
            say(
                f"note: the host {host} ({flag}) is unknown so far ({why}): asking again, at most {wait_s:g} s"
            )
        time.sleep(LOOK_S)
    by_family: dict[int, dict[str, None]] = {socket.AF_INET: {}, socket.AF_INET6: {}}
    for family, *_, where in found:
        if "%" not in str(where[0]) and not str(where[0]).startswith("fe80:"):
            by_family.setdefault(family, {})[str(where[0])] = None
    addresses = by_family[socket.AF_INET] or by_family[socket.AF_INET6]
    if not addresses:
        raise UsageError(
            f"{host} ({flag}) has link-local addresses only: each host reaches them in its own way",
            hint="an address that all hosts reach: ip -6 addr show scope global",
        )
    return tuple(a for a in addresses if not is_loopback(a)) or tuple(addresses)


def _bind(asked: str | None, contact: Contact, wait_s: float) -> str:
    try:
        if asked:
            address = _addresses(read_host(asked, "--bind"), "--bind", wait_s)[0]
        else:
            address = _here_towards(contact)
        with socket.socket(family_of(address)) as probe:
            probe.bind((address, 0))
    except OSError as error:
        raise UsageError(
            f"{asked or contact.name} ({'--bind' if asked else 'the first contact'}): {error.strerror or error}",
            hint="--bind ADDRESS: one of this host that the other hosts reach",
        ) from error
    if not interface_of(address) and not {GLOO, NCCL} <= os.environ.keys():
        raise UsageError(
            f"no network interface of this host has the address {address}: gloo and NCCL would choose one",
            hint=f"--bind with the address of an interface (ip address), or export {GLOO} and {NCCL}",
        )
    return address


def _here_towards(contact: Contact) -> str:
    """Return the address of this host from which it reaches a contact.

    A contact may have several addresses that are reached from different addresses of this host. Then the first address
    of the contact at which a host answers decides.

    Raises:
        OSError: there is no route to any address of the contact.
    """
    here: dict[str, str] = {}
    for address in contact.addresses:
        try:
            here[address] = address_towards(address, contact.port)
        except OSError as error:
            unreached = error
    if not here:
        raise unreached
    if len(set(here.values())) > 1:
        here = {address: here[address] for address in _that_answer(here, contact.port)} or here
    return next(iter(here.values()))


def _that_answer(addresses: Iterable[str], port: int) -> Iterable[str]:
    """Yield the addresses at which a host answers a dial.

    A refusal, because no process listens there, is also an answer.
    """
    for address in addresses:
        try:
            dial(Address(address, port), ANSWER_S).close()
        except ConnectionRefusedError:
            yield address
        except OSError:
            continue
        else:
            yield address


def read_counts(asked: str) -> tuple[int, ...]:
    """Parse the numbers of ``--nproc-per-node``: ``8``, or ``8,4`` for nodes of two sizes. Raises: UsageError."""
    words = [word.strip() for word in asked.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= NPROC_MAX for word in words):
        raise UsageError(
            f"--nproc-per-node {asked} is neither a number from 1 to {NPROC_MAX} (8,4: nodes of two sizes) nor auto, "
            "cpu, gpu or xpu",
            hint=RUN_HELP,
        )
    return tuple(map(int, words))


def shrink_to(values: Mapping[str, Any], nodes: NodeFlags, counts: Sequence[int]) -> int:
    """Check ``--shrink-to``. Return the smallest number of nodes with which the job continues; 0 if it never shrinks.

    Raises:
        UsageError: the number is not smaller than the number of nodes.
        UnsupportedError: nodes have different sizes, or the framework is not torch.
    """
    least = int(values["shrink_to"])
    if least == 0:
        return 0
    if not 0 < least < nodes.least:
        raise UsageError(
            f"--shrink-to {least} with {plural(nodes.least, 'node')} for ranks: 1 to {nodes.least - 1} can be meant",
            hint="leave --shrink-to out to wait for a node instead",
        )
    if len(counts) > 1:
        raise UnsupportedError(
            f"--shrink-to with {shape(nodes.least, counts)}: steps are run in equal parts, by nodes of one size only",
            hint="leave --shrink-to out to wait for a node instead",
        )
    if values["framework"] != "torch":
        raise UnsupportedError(
            f"--shrink-to with --framework {values['framework']}: steps are run in parts by PyTorch's session only",
            hint="leave --shrink-to out to wait for a node instead",
        )
    return least


def read_secret(path: str | None, nodes: NodeFlags) -> bytes:
    """Read the secret of the job from the file ``path``. Raises: UsageError.

    If ``path`` is None, return an empty secret: a job of one node makes its own. A job of several nodes needs a path.
    """
    if path is None:
        if nodes.several:
            raise UsageError(
                "several nodes need a common secret: --token-file is missing",
                hint="umask 077; openssl rand -hex 32 > token; copy it to every host; --token-file token",
            )
        return b""
    return read_token(Path(path))


def encrypts(values: Mapping[str, Any], nodes: NodeFlags) -> bool:
    """Return True if the traffic of Holdfast between hosts shall be encrypted. Raises: UsageError."""
    if not (values["encrypt"] and nodes.several):
        return False
    require_encryption()
    return True


def node_notes(nodes: NodeFlags, settings: RunSettings) -> tuple[str, ...]:
    """Return the notes about a job of several nodes that the user sees at the start; empty for one node."""
    if not nodes.several:
        return ()
    where = f"{nodes.node} at {nodes.bind}, first contact {nodes.contacts[0]}"
    spares = f", {nodes.most - nodes.least} spare" if nodes.most > nodes.least else ""
    notes = [f"{where}; {shape(settings.nnodes, settings.counts)}{spares}"]
    if is_loopback(nodes.bind):
        notes.append(
            f"{nodes.bind} is this machine only: hosts of their own need --master-addr (or --bind ADDRESS)"
        )
    if settings.encrypts:
        notes.append(ENCRYPTED)
    if nodes.most == 2 and not settings.witness:
        notes.append(
            "one of two nodes is no majority: when one is lost, the other one saves a checkpoint and asks to be "
            "started again (with --witness DIR it continues)"
        )
    return tuple(notes)
