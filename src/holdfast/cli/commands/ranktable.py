"""The command ``holdfast ranktable``, which checks a rank table or writes one."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from holdfast.cli.screen.escaping import echo, echo_json
from holdfast.cli.start.node_flags import read_counts
from holdfast.errors import UsageError
from holdfast.exit_codes import Exit
from holdfast.runtime.node.run_settings import shape
from holdfast.runtime.node.rundir import write_private
from holdfast.runtime.rank_table.hccl_rules import hccl_mistakes, hccl_notes
from holdfast.runtime.rank_table.table import (
    FILE_SIZE_MAX_BYTES,
    SERVER_VERSIONS,
    check,
    device_addresses,
    make,
    read,
    refusal,
)
from holdfast.store.backends.user_files import read_given
from holdfast.text import plural

WIDTH = 24


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def ranktable() -> None:
    """Check a rank table, or write one (docs/rank-tables.md)."""


@ranktable.command(name="check")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option(
    "--hccl", is_flag=True, help="Also what HCCL asks for: sizes, networks, all devices of several hosts."
)
def check_file(file: Path, as_json: bool, hccl: bool) -> int:
    """Print all mistakes in FILE. The exit code is 2 if there is one."""
    found = read(file)
    notes: tuple[str, ...] = ()
    if hccl and found.table is not None:
        mistakes, notes = hccl_mistakes(found.table), hccl_notes(found.table)
        found = found._replace(mistakes=mistakes, table=None if mistakes else found.table)
    if as_json:
        shown = {"file": str(file), "status": found.status, "table": found.table, "mistakes": found.mistakes}
        echo_json(msgspec.json.format(msgspec.json.encode(shown), indent=2))
        return Exit.OK if found.table is not None else Exit.USAGE
    if found.table is None:
        raise refusal(file, found.mistakes)
    table = found.table
    size = f"{plural(len(table.servers), 'host')}, {plural(table.world_size, 'rank')}"
    echo(f"{file}: version {table.version}, {size}, no mistake")
    for number, server in enumerate(table.servers):
        ranks = [device.rank for device in server.devices]
        where = server.name if server.address in ("", server.name) else f"{server.name} ({server.address})"
        echo(f"  node {number}  {where or 'any host':{WIDTH}}  ranks {ranks[0]} to {ranks[-1]}")
    for note in notes:
        echo(f"note: {note}")
    return Exit.OK


@ranktable.command(name="make")
@click.option("--hosts", required=True, help="Addresses of the hosts, with commas.")
@click.option("--nproc-per-node", "--nproc_per_node", required=True,
              help="Devices of each host: a number, or one for each of --hosts.")  # fmt: skip
@click.option("--version", "version", type=click.Choice(SERVER_VERSIONS), default="1.0", show_default=True)
@click.option("--hccn", multiple=True, metavar="HOST=FILE", help="The host's /etc/hccn.conf, for device_ip.")
@click.option("--output", type=click.Path(path_type=Path), help="File to write (default: print it).")
@click.option("--hccl", is_flag=True, help="Refuse a table that HCCL would not take.")
def make_file(
    hosts: str, nproc_per_node: str, version: str, hccn: tuple[str, ...], output: Path | None, hccl: bool
) -> int:
    """Write a table of hosts, in the order that the format requires."""
    names = [name.strip() for name in hosts.split(",") if name.strip()]
    counts = read_counts(nproc_per_node)
    data = make(names, counts, version, dict(_addresses(each, names) for each in hccn))
    if hccl:
        _check_for_hccl(data)
    if names != sorted(names):
        echo(f"note: ranks follow the letters of the addresses: {', '.join(sorted(names))}", err=True)
    if output is None:
        echo_json(data, nl=False)
        return Exit.OK
    try:
        write_private(output, data)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}", hint="--output FILE in a directory that can be "
                         "written") from error  # fmt: skip
    echo(f"{output}: {shape(len(names), counts)}; holdfast run --rank-table {output} ...")
    return Exit.OK


def _check_for_hccl(data: bytes) -> None:
    """Check that HCCL would accept the rank table ``data``, and print HCCL's notes about it. Raises: UsageError."""
    table = check(data).table
    assert table is not None, "what is made has no mistake"
    if mistakes := hccl_mistakes(table):
        raise UsageError("\n  ".join(["HCCL takes no table of these hosts:", *map(str, mistakes)]),
                         hint="--nproc-per-node 1, 2, 4 or 8 for one host, 8 for several")  # fmt: skip
    for note in hccl_notes(table):
        echo(f"note: {note}", err=True)


def _addresses(text: str, names: list[str]) -> tuple[str, dict[int, str]]:
    host, equals, file = text.partition("=")
    if not equals or host not in names:
        raise UsageError(f"--hccn {text} is not HOST=FILE with one of --hosts",
                         hint=f"--hccn {names[0] if names else 'HOST'}=hccn.conf")  # fmt: skip
    try:
        return host, device_addresses(read_given(Path(file), FILE_SIZE_MAX_BYTES).decode(errors="replace"))
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}", hint="copy it from the host") from error
