"""The environment has the packages that these tests are written for."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


@pytest.mark.smoke
def test_torch_is_the_pinned_cpu_build() -> None:
    assert torch.__version__.split("+")[0] == "2.13.0"
    assert not torch.cuda.is_available()
