"""``python -m holdfast``: the command of this interpreter, whatever ``PATH`` says."""

from holdfast.cli.main import main

main()
