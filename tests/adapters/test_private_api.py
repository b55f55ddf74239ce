"""Private names of torch: each is found through one table, and no other module uses one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.private_api import USES, uses_of
from holdfast.frameworks.torch.probing import Feature, Use, probe
from holdfast.runtime.node.torch_build import version_of

pytestmark = pytest.mark.torch

PACKAGE = Path(holdfast.__file__).parent
PLACES = (
    "frameworks/torch",
    "frameworks/common",
    "torch.py",
    "drill",
    "session",
    "runtime",
    "store",
    "core",
    "cli",
)
OF_PYTHON = {
    "_Environ",
    "_asdict",
    "_current_frames",
    "_exit",
    "_fields",
    "_getframe",
    "_replace",
    "_run_exitfuncs",
    "_value_",
}
OF_OTHERS = {
    "_StorageInfo",  # a name in DCP's metadata, never looked up in torch
    "_set_sync_gradients",  # a name of accelerate
    "_dataloader",  # a name of Lightning Fabric
}


@pytest.mark.parametrize("use", uses_of(version_of(torch.__version__)), ids=lambda use: use.path)
def test_the_installed_torch_has_each_name(use: Use) -> None:
    if use.feature is Feature.NCCL and not torch.distributed.is_nccl_available():
        pytest.skip("this build has no NCCL")
    assert probe(use) == ""


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("torch.no_such_module:name", "No module named"),
        ("torch.nn:NoSuchClass.name", "there is no NoSuchClass"),
        ("torch.nn:Module._no_such_attribute", "there is no such name"),
    ],
)
def test_a_probe_names_what_is_missing(path: str, wrong: str) -> None:
    assert wrong in probe(Use(path, "a test", Feature.STATE))


def test_a_probe_names_a_parameter_that_is_gone() -> None:
    use = Use(
        "torch.distributed.distributed_c10d:init_process_group", "a test", Feature.GROUPS, takes=("colour",)
    )
    assert probe(use).endswith("it no longer takes colour")


def test_a_name_counts_in_its_versions_only() -> None:
    paths = {use.path for use in uses_of((2, 13))}
    newer = {use.path for use in USES if use.since > (2, 13)}
    assert newer and not paths & newer
    assert newer <= {use.path for use in uses_of((2, 15))}


def test_failures_are_told_by_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Use("torch.nn:Module._gone", "a test", Feature.FSDP2)
    monkeypatch.setattr(private_api, "USES", (*USES, gone))
    assert private_api.failures(Feature.FSDP2) == ["torch.nn:Module._gone: there is no such name"]
    assert private_api.failures(Feature.STATE) == []
    passed, failed = private_api.probed()
    assert passed and failed == [
        ("torch.nn:Module._gone: there is no such name", "recovery in place of FSDP2")
    ]


def _private_uses() -> Iterator[str]:
    """Yield attributes, imports and looked-up names with an underscore that no module of the package defines."""
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    ours = {name for tree in trees.values() for name in _defined(tree)}
    assert all((PACKAGE / place).exists() for place in PLACES), "a place that has moved would not be searched"
    for path, tree in trees.items():
        here = path.relative_to(PACKAGE).as_posix()
        if path.name in ("private_api.py", "private_names.py") or not here.startswith(PLACES):
            continue
        for node in ast.walk(tree):
            for name in _names(node):
                if name not in ours | OF_PYTHON | OF_OTHERS:
                    yield f"{here}:{getattr(node, 'lineno', 0)}: {name}"


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and _is_private(node.attr):
        yield node.attr
    if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch"):
        yield from (
            part for part in (*node.module.split("."), *(a.name for a in node.names)) if _is_private(part)
        )


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_other_module_touches_a_private_name_of_torch() -> None:
    assert list(_private_uses()) == []
