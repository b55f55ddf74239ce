"""The command ``holdfast compat``, which installs packages ``mindio_ttp`` and ``taskd`` that are built on Holdfast."""

from __future__ import annotations

from pathlib import Path

import click

from holdfast.cli.screen.escaping import echo
from holdfast.compat.packages import PACKAGES, remove, site, write
from holdfast.exit_codes import Exit

_into = click.option("--into", type=click.Path(path_type=Path, file_okay=False, exists=True),
                     help="Directory of packages (default: this Python's).")  # fmt: skip


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def compat() -> None:
    """Install or remove mindio_ttp and taskd, packages built on Holdfast (docs/compat.md)."""


@compat.command(name="install")
@_into
def install_packages(into: Path | None) -> int:
    """Make mindio_ttp and taskd importable: MindSpore's own fault tolerance then runs on CPU."""
    folder = into or site()
    write(folder)
    echo(f"{' and '.join(PACKAGES)} are in {folder}; take them away: holdfast compat remove")
    echo("next: MS_ENABLE_TFT='{TTP:1}' msrun ... (docs/compat.md)")
    return Exit.OK


@compat.command(name="remove")
@_into
def remove_packages(into: Path | None) -> int:
    """Remove only the files that `holdfast compat install` wrote."""
    gone = remove(into or site())
    echo("\n".join(f"removed {path}" for path in gone) or "nothing of Holdfast's was there")
    return Exit.OK
