"""The command ``holdfast completion``, which prints a completion script for bash, zsh, fish or tcsh.

click makes the scripts for bash, zsh and fish. The script for tcsh is a fixed text.
"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from holdfast.cli.screen.escaping import echo
from holdfast.cli.start.flags import FLAGS
from holdfast.errors import UsageError

PROGRAM = "holdfast"
VARIABLE = "_HOLDFAST_COMPLETE"  # the name that click derives from the name of the program
SHELLS = ("bash", "zsh", "fish", "tcsh")


def script_for(shell: str) -> str:
    """Return the script by which ``shell`` completes commands, flags, and files after ``holdfast run``.

    Raises:
        UsageError: ``shell`` is not supported.
    """
    from holdfast.cli.main import COMMANDS, cli  # imported here, because ``main`` imports this module

    if shell not in SHELLS:
        raise UsageError(
            f"{shell}: no such shell is known; supported are {', '.join(SHELLS)}",
            hint="holdfast completion bash > ~/.local/share/bash-completion/completions/holdfast",
        )
    if shell == "tcsh":
        flags = " ".join(flag.name.removeprefix("--") for flag in FLAGS)
        return f"complete {PROGRAM} 'p/1/({' '.join(COMMANDS)})/' 'c/--/({flags})/' 'n/*/f/'"
    made = get_completion_class(shell)
    assert made is not None, "click knows these three"
    return made(cli, {}, PROGRAM, VARIABLE).source()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("shell", metavar="|".join(SHELLS))
def completion(shell: str) -> int:
    """Print the script with which a shell completes commands, flags, scripts and runs.

    For bash, add this line to ~/.bashrc: eval "$(holdfast completion bash)". For zsh, add the same line with zsh to
    ~/.zshrc. For fish, run: holdfast completion fish > ~/.config/fish/completions/holdfast.fish
    """
    echo(script_for(shell))
    return 0
