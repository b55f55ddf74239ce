"""Functions of TorchScript in a session: the same bits at each call, and after any earlier call."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.processes]

SCRIPT = """
import sys
import torch
from holdfast.frameworks.torch.steps.plain_torchscript import PlainTorchScript
import TEXT

x = torch.linspace(-2, 2, 4096, requires_grad=True)
plain = PlainTorchScript() if "plain" in sys.argv else None
if "evaluated" in sys.argv:
    with torch.no_grad():
        TEXT.gate(x), TEXT.gate(x)
found = [torch.autograd.grad(TEXT.gate(x).sum(), x)[0].numpy().tobytes().hex() for _ in range(4)]
if plain is not None:
    plain.remove()
print(torch._C._jit_set_profiling_mode(True), *found)
"""
FUNCTION = """
import torch

@torch.jit.script
def gate(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * torch.sigmoid(x)
"""


def gradients(where: object, *words: str) -> list[str]:
    """Return the gradients of four calls in a process of their own; each is the bytes of a tensor."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT.replace("TEXT", "functions_here"), *words],
        cwd=str(where),
        check=True,
        capture_output=True,
        text=True,
    )
    on, *found = done.stdout.split()
    assert on == "True", "the setting of before is restored"
    return found


def test_each_call_gives_the_same_bits(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Regression: the first call had other gradients, and so had all calls after an evaluation."""
    where = tmp_path_factory.mktemp("functions")
    (where / "functions_here.py").write_text(FUNCTION)
    usual = gradients(where)
    assert len(set(usual)) == 2 and set(gradients(where, "evaluated")) == {usual[0]}, "what this is for"
    assert set(gradients(where, "plain")) == set(gradients(where, "plain", "evaluated")) == {usual[0]}
