"""The files of the packages ``mindio_ttp`` and ``taskd`` in site-packages: functions that write and remove them."""

from __future__ import annotations

import shutil
import sysconfig
from importlib.machinery import ModuleSpec
from pathlib import Path

from holdfast.compat.import_hook import VARIABLES
from holdfast.errors import UsageError

PACKAGES = ("mindio_ttp", "taskd")
ALIASES = {
    "mindio_ttp": "",
    "mindio_ttp.framework_ttp": "holdfast.compat.framework_ttp",
    "mindio_ttp.megatron_ttp": "holdfast.compat.megatron_ttp",
    "taskd": "",
    "taskd.api": "",
    "taskd.api.taskd_agent_api": "holdfast.compat.taskd_agent",
}
"""The module of Holdfast that each module name leads to; empty: a package that only holds submodules."""

MARK = "# Written by `holdfast compat install`; `holdfast compat remove` takes it away.\n"
HOOK_FILE = "holdfast-compat.pth"
HOOK = (
    f"import os; any(name in os.environ for name in {VARIABLES!r}) "
    "and __import__('holdfast.compat.import_hook', fromlist=['watch']).watch()\n"
)
"""A line that Python executes at each start. It imports a module only if one of :data:`VARIABLES` is set."""


def is_ours(spec: ModuleSpec) -> bool:
    """Return whether :func:`write` wrote the package of this module spec."""
    return bool(spec.origin) and _marked(Path(spec.origin or ""))


def site() -> Path:
    """Return the site-packages directory of this Python."""
    return Path(sysconfig.get_path("purelib"))


def write(folder: Path) -> list[Path]:
    """Write the packages and the import hook into ``folder``, replacing earlier ones. Return the written files.

    Raises:
        UsageError: ``folder`` holds a foreign package of the same name, or cannot be written.
    """
    for package in PACKAGES:
        if (folder / package).exists() and not _marked(folder / package / "__init__.py"):
            raise UsageError(
                f"{folder / package} is there, and not Holdfast's", hint=f"pip uninstall {package}"
            )
    written = []
    try:
        for name, target in ALIASES.items():
            path = folder.joinpath(*name.split("."))
            if not target:
                path.mkdir(exist_ok=True)
                written.append(path / "__init__.py")
                written[-1].write_text(MARK)
            else:
                written.append(path.with_suffix(".py"))
                code = f"{MARK}import sys\n\nimport {target}\n\nsys.modules[__name__] = sys.modules[{target!r}]\n"
                written[-1].write_text(code)
        written.append(folder / HOOK_FILE)
        written[-1].write_text(HOOK)
    except OSError as error:
        raise UsageError(f"cannot write into {folder}: {error.strerror}",
                         hint="holdfast compat install --into DIRECTORY") from error  # fmt: skip
    return written


def remove(folder: Path) -> list[Path]:
    """Remove the files that :func:`write` wrote into ``folder``. Return the removed paths.

    Raises:
        UsageError: the files cannot be removed.
    """
    gone = []
    try:
        for package in PACKAGES:
            if _marked(folder / package / "__init__.py"):
                shutil.rmtree(folder / package)
                gone.append(folder / package)
        if (folder / HOOK_FILE).exists():
            (folder / HOOK_FILE).unlink()
            gone.append(folder / HOOK_FILE)
    except OSError as error:
        raise UsageError(
            f"cannot remove from {folder}: {error.strerror}",
            hint=f"check its owner and permissions: ls -ld {folder}",
        ) from error
    return gone


def _marked(path: Path) -> bool:
    return path.is_file() and path.read_text(errors="replace").startswith(MARK)
