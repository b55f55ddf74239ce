"""Print constraints.txt: the installed version of each package that Holdfast and its tests require.

Torch is not among them: the Makefile pins it. ``make constraints`` runs this in a new environment.
"""

import re
from importlib import metadata

_HEAD = """\
# The versions that `make venv` installs for the tests and the checks, so that the same commit gets the same verdict on
# any day. `make constraints` writes this file from the newest versions. Torch is pinned in the Makefile.
# A user gets the newest versions: `scripts/torches --smoke newest`, a part of .ci/run, installs as the README says."""


def main() -> None:
    print(_HEAD)
    named = [
        line
        for line in metadata.requires("holdfast") or ()
        if 'extra == "dev"' in line or "extra ==" not in line
    ]
    for name in sorted({re.split(r"[\[<>=~! ;]", line)[0].lower() for line in named}):
        print(f"{name}=={metadata.version(name)}")


if __name__ == "__main__":
    main()
