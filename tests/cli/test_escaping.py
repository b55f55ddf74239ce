"""Text from files and scripts cannot control the reader's terminal."""

from __future__ import annotations

import ast
import io
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.screen import console, escaping
from holdfast.cli.screen.escaping import UNSAFE, coloured, shown
from holdfast.cli.screen.fault_report import reports_of, write
from holdfast.core.protocol.messages import Field
from holdfast.event_log import read
from holdfast.runtime.node.run_settings import SETTINGS_FILE
from holdfast.runtime.node.rundir import log_path, write_private
from tests.cli.command import Run, on_terminal
from tests.cli.test_status import FAULT, TIMES, Made, swept

__all__ = ["swept"]

pytestmark = pytest.mark.usefixtures("swept")

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b5n\u202eEVIL"
ESCAPED = r"\x1b]0;owned\x07\x1b[2J\x9b5n\u202eEVIL"
IN_TABLES = ESCAPED.replace(r"\x07", "")  # rich removes BEL
CLI = Path(escaping.__file__).parents[1]
COMMANDS = [
    ["status", "it"],
    ["report", "it"],
    ["logs", "it"],
    ["status", "it", "--json"],
    ["report", "it", "--json"],
]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Make a run whose events, settings and output have control characters wherever text is allowed."""
    made = Made(tmp_path, "it")
    made.start(0, 1)
    fault: dict[str, Field] = {**FAULT, "kind": "exception", "what": EVIL, "node": EVIL}
    made.journal.append("session_opened", {"step": 0, "root": EVIL, "generation": "1.1"})
    made.journal.append("detected", fault)
    made.journal.append("verdict", {"action": EVIL, "reason": EVIL, "evidence": [EVIL]})
    made.journal.append("recovered", {**fault, "steps_lost": 0, "freed_s": 0.03, **TIMES})
    made.end(1, EVIL)
    path = made.directory.path
    log_path(path, 0, 1).write_text(f"{EVIL} \x1b[31mred\x1b[0m\n")
    settings = msgspec.structs.replace(made.settings, command=("holdfast", "run", EVIL))
    write_private(path / SETTINGS_FILE, msgspec.json.encode(settings))
    return made


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_prints_control_characters_of_a_run(holdfast: Run, made: Made, command: list[str]) -> None:
    done = holdfast(*command)
    assert done.returncode == 0 and not UNSAFE.search(done.stdout + done.stderr)
    assert any(form in done.stdout for form in (ESCAPED, IN_TABLES, r"\u001b]0;owned\u0007"))


def test_on_a_terminal_styles_and_colours_of_ranks_alone_are_left(tmp_path: Path, made: Made) -> None:
    for command in (["status", "it"], ["report", "it"], ["logs", "it"]):
        code, text = on_terminal(*command, cwd=tmp_path, env={"COLUMNS": "300"})
        kept = coloured(text.replace("\r\n", "\n"))
        assert code == 0 and (ESCAPED in kept or IN_TABLES in kept)
        assert "\x1b]" not in text and "\x07" not in text and "\x1b[2J" not in text and "\x9b" not in text
    assert "\x1b[31mred\x1b[0m" in text


def test_raw_logs_are_what_was_printed(holdfast: Run, made: Made) -> None:
    assert holdfast("logs", "it", "--rank", "1", "--raw").stdout == f"{EVIL} \x1b[31mred\x1b[0m\n"


def test_a_report_that_is_written_holds_no_control_character(made: Made) -> None:
    (found,) = reports_of(made.directory, made.settings, read(made.directory.journal).events)
    written = write(made.directory, found).read_text()
    assert ESCAPED in written and not UNSAFE.search(written)


def test_the_error_of_a_name_with_control_characters(holdfast: Run) -> None:
    for words in (
        ["status", EVIL],
        [EVIL],
        ["run", f"{EVIL}.py"],
        ["ckpt", "ls", EVIL],
        ["run", f"--{EVIL}"],
    ):
        done = holdfast(*words)
        assert done.returncode and not UNSAFE.search(done.stdout + done.stderr), words
        assert "EVIL" in done.stderr


def test_a_line_keeps_its_colours_and_loses_the_movements_of_bars() -> None:
    assert coloured("\x1b[1;32mloss\x1b[0m 3") == "\x1b[1;32mloss\x1b[0m 3\x1b[0m"
    assert coloured("50%\x1b[A\x1b[K") == "50%"
    assert coloured("\x1b]8;;http://x\x07link\x1b\\") == r"\x1b]8;;http://x\x07link\x1b\\"[:-1]
    assert shown("two\nlines\tand a tab, \r\x85") == "two\nlines\tand a tab, \\r\\x85".replace("\\r", "\\x0d")


@given(st.text(st.characters(codec="utf-8")))
def test_nothing_that_is_shown_drives_a_terminal(text: str) -> None:
    assert not UNSAFE.search(shown(text)) and shown(shown(text)) == shown(text)
    assert not UNSAFE.search(re.sub(r"\x1b\[[\d;:]*m", "", coloured(text)))


def test_the_console_of_tables_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    screen = console.table_console()
    screen.file = out
    screen.print(EVIL)
    assert out.getvalue() == f"{IN_TABLES}\n"


def test_the_command_prints_through_this_module_alone() -> None:
    """``click.echo``, ``print`` and a console of rich write text without escaping it."""
    wrong = {"click.echo", "click.secho", "print", "Console", "traceback.print_exception", "sys.stdout.write"}
    found = [
        f"{path.name}:{node.lineno} {ast.unparse(node.func)}"
        for path in sorted(CLI.rglob("*.py"))
        if path.name != "escaping.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in wrong
    ]
    assert not found
