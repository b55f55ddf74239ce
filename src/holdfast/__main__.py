"""``python -m holdfast``: the ``holdfast`` command of this interpreter, independent of ``PATH``."""

from holdfast.cli.main import main

main()
