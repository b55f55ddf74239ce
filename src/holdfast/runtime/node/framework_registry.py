"""The registry of frameworks: for each, the module that prepares a worker, and the modules that the zygote imports.

It contains only names, so that its import loads no framework.
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
    """The names that belong to one framework.

    ``install_module`` has a function ``install()``, which a worker calls before user code. ``preloads`` are the modules
    that the zygote imports, the framework itself first. ``records_module`` has a function ``records()``, which returns
    the flight records of the framework. ``records_module`` is empty for a framework without a flight recorder.
    """

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
            "holdfast.frameworks.torch.comm.backend",
            "holdfast.frameworks.torch.adapter",
            "holdfast.frameworks.torch.plain_adapter",
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
        # Not holdfast.tensorflow: it loads Keras, and a script may still choose which one (TF_USE_LEGACY_KERAS).
        (
            "tensorflow",
            "holdfast.frameworks.tensorflow.adapter",
            "holdfast.frameworks.tensorflow.worker_setup",
        ),
    ),
}
SESSION_PRELOADS = ("holdfast.session.api", "holdfast.session.session")
COMMON_PRELOADS = ("holdfast.runtime.worker.entry",)


def install_framework(name: FrameworkName) -> None:
    """Prepare this worker for its framework. A missing torch is not an error, because the script may not need it.

    If torch is not loaded yet, it is prepared when the script imports it. So variables that the script sets before its
    import of torch have an effect.

    Raises:
        ScriptError: a framework was requested by name and is not installed.
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
    """Return the framework's own flight records of this process; empty if the framework is not loaded."""
    framework = FRAMEWORKS[name]
    if not framework.records_module or framework.package not in sys.modules:
        return Records()
    found: Records = importlib.import_module(framework.records_module).records()
    return found


_broken: list[Exception] = []  # the error of the first import of torch in this process or in its zygote


def note_broken(error: Exception) -> None:
    """Keep the error of a failed import of torch in the zygote.

    torch can be loaded only once per process, so each forked worker reports this error.
    """
    _broken.append(error)


class _WhenImported:
    """An import finder that prepares torch for Holdfast once, as soon as it is imported.

    Raises:
        FrameworkError: (from the import) the installed torch cannot work or cannot be loaded.
    """

    def __init__(self, framework: Framework) -> None:
        self._framework = framework

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the import spec of torch, with a loader that also prepares torch; None for other modules."""
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
