"""Which module of ring 3 makes a worker ready for its framework, and what the zygote imports before it forks.

Only names: nothing here loads a framework.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Literal, NamedTuple

from holdfast.core.protocol.health_messages import Records
from holdfast.errors import ScriptError
from holdfast.runtime.node.torch_build import cannot_load, check_loaded, torch_build

FrameworkName = Literal["torch", "mindspore", "tensorflow"]


class Framework(NamedTuple):
    """``install_module`` has ``install()``, called before user code; ``preloads`` are imported once per node;
    ``records_module`` has ``records()``, empty for a framework without a flight recorder."""

    package: str
    requirement: str
    install_module: str
    preloads: tuple[str, ...]
    records_module: str = ""


FRAMEWORKS: dict[FrameworkName, Framework] = {
    "torch": Framework(
        "torch",
        "torch",
        "holdfast.frameworks.torch.comm.backend",
        (
            "torch",
            "torch.distributed",
            "torch.nn.parallel",
            "torch.distributed.fsdp",
            "torch.distributed.tensor",
            "torch.utils.data",
            "torch._dynamo",
            "holdfast.adapters.torch",
            "holdfast.frameworks.torch.comm.backend",
        ),
        "holdfast.frameworks.torch.comm.flight_records",
    ),
    "mindspore": Framework(
        "mindspore",
        "'mindspore==2.10.0' 'numpy<2'",
        "holdfast.frameworks.mindspore.worker_setup",
        (
            "mindspore",
            "mindspore.dataset",
            "mindspore.train",
            "holdfast.mindspore",
            "holdfast.frameworks.mindspore.worker_setup",
        ),
    ),
    "tensorflow": Framework(
        "tensorflow",
        "tensorflow-cpu",
        "holdfast.frameworks.tensorflow.worker_setup",
        # Not holdfast.tensorflow: it loads Keras, and a script may still say which (TF_USE_LEGACY_KERAS).
        (
            "tensorflow",
            "holdfast.frameworks.tensorflow.adapter",
            "holdfast.frameworks.tensorflow.worker_setup",
        ),
    ),
}
COMMON_PRELOADS = ("holdfast.session", "holdfast.runtime.worker.entry")


def install_framework(name: FrameworkName) -> None:
    """Make this worker ready for its framework. A torch that is not installed is no error: the script may need none.

    A torch that is not loaded is made ready when the script imports it: variables that it sets before count.

    Raises:
        ScriptError: a framework was asked for by name and is not installed.
        FrameworkError: the installed torch cannot work.
    """
    framework = FRAMEWORKS[name]
    if name == "torch" and framework.package not in sys.modules:
        sys.meta_path.insert(0, _WhenImported(framework))
        return
    if name == "torch":
        torch_build()
        check_loaded(sys.modules[name])
    try:
        module = importlib.import_module(framework.install_module)
    except ModuleNotFoundError as error:
        if error.name != framework.package:
            raise
        raise ScriptError(
            f"--framework {name}: {framework.package} is not installed for this interpreter",
            hint=f"pip install {framework.requirement}",
        ) from error
    module.install()


def records(name: FrameworkName) -> Records:
    """What the framework has recorded of its collectives; nothing where it is not loaded."""
    framework = FRAMEWORKS[name]
    if not framework.records_module or framework.package not in sys.modules:
        return Records()
    found: Records = importlib.import_module(framework.records_module).records()
    return found


_broken: list[Exception] = []  # what the first import of torch in this process, or in its zygote, has raised


def note_broken(error: Exception) -> None:
    """An import of torch failed in the zygote. torch can be loaded once per process: a worker tells this reason."""
    _broken.append(error)


class _WhenImported:
    """A finder that lets torch be made ready as soon as it is imported, once.

    Raises:
        FrameworkError: (from an import) the installed torch cannot work, or be loaded.
    """

    def __init__(self, framework: Framework) -> None:
        self._framework = framework

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The framework's own spec, whose loader does one thing more; None for other modules."""
        if name != self._framework.package:
            return None
        sys.meta_path.remove(self)
        if not _broken:
            torch_build()
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_install(module: ModuleType) -> None:
                try:
                    if _broken:
                        raise _broken[0]
                    load(module)
                except (ImportError, OSError) as error:
                    raise cannot_load(error) from error
                check_loaded(module)
                importlib.import_module(self._framework.install_module).install()

            spec.loader.exec_module = load_and_install  # type: ignore[method-assign]
        return spec
