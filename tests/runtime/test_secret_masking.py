"""Secrets in command lines are not written to files."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.runtime.node.run_settings import SETTINGS_FILE, RunSettings
from holdfast.runtime.node.secret_masking import masked

S = "s3cr3t"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--token", S, "--epochs", "3"], ["--token", "***", "--epochs", "3"]),
        (["--hf_token", S], ["--hf_token", "***"]),
        ([f"--wandb-api-key={S}"], ["--wandb-api-key=***"]),
        ([f"WANDB_API_KEY={S}"], ["WANDB_API_KEY=***"]),
        ([f"+logger.apiKey={S}"], ["+logger.apiKey=***"]),
        (["-password", f"-{S}", "x"], ["-password", "***", "x"]),
        ([f"s3://user:{S}@host/x"], ["s3://***@host/x"]),
        ([f"https://h/x?a=1&X-Amz-Signature={S}&b=2"], ["https://h/x?a=1&X-Amz-Signature=***&b=2"]),
        ([f"hf_{'a' * 34}", f"x,sk-{'b' * 40}"], ["***", "x,***"]),
        # names of other things
        (["--token-file", "token", "--tokenizer", "gpt2"], ["--token-file", "token", "--tokenizer", "gpt2"]),
        (["--max-tokens", "9", "--monkey=1", "--author", "a"], ["--max-tokens", "9", "--monkey=1", "--author", "a"]),
        (["--key", "--flag", "x"], ["--key", "--flag", "x"]),
        (["--auth="], ["--auth="]),
    ],
)  # fmt: skip
def test_secrets_are_known_by_name_or_form(words: list[str], expected: list[str]) -> None:
    assert list(masked(words)) == expected


def test_settings_are_written_without_secrets_and_the_script_gets_its_own(tmp_path: Path) -> None:
    settings = RunSettings(
        run_id="it", args=("--api-key", S), command=("holdfast", "run", "train.py", "--api-key", S)
    )
    settings.save(tmp_path)
    assert S not in (tmp_path / SETTINGS_FILE).read_text()
    assert RunSettings.load(tmp_path).args == settings.args
    assert RunSettings.load(tmp_path).command == (*settings.command[:-1], "***")
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in tmp_path.iterdir())
