"""The public functions ``holdfast.session`` (here :func:`open_session`) and ``holdfast.load``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.errors import CheckpointInvalid, UsageError, hinted
from holdfast.session.arguments import checked

if TYPE_CHECKING:
    from holdfast.frameworks.common.adapter import Adapter
    from holdfast.session.session import Session
    from holdfast.session.steps.nonfinite import NonFinite
    from holdfast.store.backends.location import Place
    from holdfast.store.manage.retention import Kept, SaveWhen
    from holdfast.store.read.load import LoadReport


log = logging.getLogger("holdfast")
PREFIX = "holdfast: "


@checked("holdfast.session")
def open_session(
    *,
    model: Any,
    optimizer: Any,
    scheduler: Any = None,
    scaler: Any = None,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: str = "auto",
    seed: int = 0,
    save: SaveWhen = None,
    save_every_steps: int | None = None,
    save_every_s: float | None = None,
    keep: Kept = 3,
    copies: int = 1,
    state: dict[str, Any] | None = None,
    exit_file: str | os.PathLike[str] | None = None,
    grace_s: float | None = None,
    memory: int | None = None,
    verify_block: int = 2000,
    verify_data: bool = True,
    verify_ranks: int = 0,
    nonfinite: NonFinite = "warn",
    override: Iterable[str] = (),
) -> Session:
    """Protect a training: ``with holdfast.session(...) as s: for step in s.steps(...): with step as batch: ...``.

    Args:
        model: the trained module (plain, DDP, ``fully_shard`` or compiled), or a dict of modules by name.
        optimizer, scheduler: one, a list, or a dict by name. scaler: a ``GradScaler``.
        checkpoint: directory or ``s3://bucket/prefix`` of checkpoints. None means the directory of ``holdfast run``.
        resume: ``auto`` (the newest valid checkpoint; a fresh start if there is none), ``never`` (a fresh start), a
            checkpoint, a directory or URL of checkpoints, or ``DIRECTORY@STEP``.
        seed: the seed of all random numbers in the steps.
        save: when to save: a number of steps, a ``timedelta``, ``"auto"`` (the interval that costs least), a policy
            (see ``holdfast.store.manage.retention``), or a list. None means that only ``Session.save()`` saves.
        save_every_steps, save_every_s: further intervals of saves, in steps and in seconds.
        keep: valid checkpoints that are not removed, from this run and the runs that it continues: the newest N, those
            younger than a ``timedelta``, a policy (see ``save``), or a list of these.
        copies: copies of each tensor in a checkpoint, in different files. With 2, any one file may be lost.
        memory: steps between two copies of a rank's state in shared memory (0 for none, None for ``--memory-every``).
        state: further objects with ``state_dict``/``load_state_dict``, random generators, tensors or plain values of
            the whole job, by name; see ``Session.state``. Values of one rank belong into ``Session.own``.
        exit_file: JSON file. The job saves and leaves when a user writes ``{"GracefulExit": 1}`` into the file.
        verify_block: steps between two checks that a block computes the same again (ImpureBlockError); 0 for none.
        verify_data: check that a resumed process draws the same batches as the process before it (DataError).
        verify_ranks: steps between checks that another rank computes the same gradients (ComputeError); 0 for none.
        nonfinite: action if an optimizer is about to use gradients with inf or nan: ``stop`` (raise NonFiniteError in
            the step), ``skip`` the update on all ranks, ``warn`` once and keep a finite checkpoint, or ``ignore``.
        override: names of hyperparameters (``["lr"]``). A resume takes their values from the script if the script has
            changed them. All others keep the checkpoint's value. The factor of a learning rate schedule is kept.
        grace_s: seconds from a signal or exit file until the process ends, even without a checkpoint (None: no limit).

    Raises (when the session is entered; a UsageError also by this call):
        UsageError, UnsupportedError: an argument, optimizer, wrapper, hook or process group that cannot work.
        StateError: a part of the state that cannot be saved; the error names the part by its key path.
        NothingToResume, CheckpointMismatch: no checkpoint can be loaded. StoreWriteError: none can be written.
    """
    from holdfast.session.session import Session
    from holdfast.session.settings import SessionSettings, extras_of

    configure_logging()
    settings = SessionSettings(
        checkpoint=checkpoint, resume=resume, seed=seed, save=save, save_every_steps=save_every_steps,
        save_every_s=save_every_s, keep=keep, copies=copies, exit_file=exit_file, grace_s=grace_s, memory=memory,
        verify_block=verify_block, verify_data=verify_data, verify_ranks=verify_ranks, nonfinite=nonfinite,
    )  # fmt: skip
    extras, taken = extras_of(state), _names("session(override", override, "lr")
    _require_torch(model)
    given = (model, optimizer, scheduler, scaler, extras, seed, taken)
    return Session(partial(_torch_adapter, *given), extras, settings)


@checked("holdfast.load")
def load(
    path: Place | str | os.PathLike[str],
    model: Any,
    strict: bool = True,
    *,
    optional: Iterable[str] = (),
    cast: bool = False,
) -> LoadReport:
    """Load the weights of a checkpoint into ``model`` without a session, after verifying their checksums.

    Args:
        path: a checkpoint, a directory of checkpoints (the newest valid one is taken), or ``DIRECTORY@STEP``.
        model: a module or a dict of modules, as in the session that saved the checkpoint.
        strict: refuse a checkpoint that lacks a parameter, buffer or extra state (other than None) of the model, or has
            an additional one.
        optional: name patterns (``head.*``) of tensors that ``strict`` does not check. Such a tensor may be missing on
            either side, or have another shape or dtype; the model then keeps its own values.
        cast: convert floating-point values to the model's dtype. A value that this dtype cannot hold is an error.

    Returns:
        A report. Its ``missing``, ``unexpected`` and ``mismatched`` list the tensors that were not loaded.

    Raises:
        UsageError: ``path`` does not exist, or an argument has the wrong type.
        NothingToResume: ``path`` has no valid checkpoint.
        CheckpointInvalid: a tensor of the model is damaged in the checkpoint and has no copy; the model is unchanged.
        CheckpointMismatch: the checkpoint is of another model; the error lists differences. The model is unchanged.
    """
    from holdfast.frameworks.common.weight_selection import beside_the_model, extra_states, joined_values
    from holdfast.frameworks.torch.state.state import TorchState
    from holdfast.store.backends.local_store import threads_of_rank
    from holdfast.store.manage.checkpoint_root import find, repair_command
    from holdfast.store.read.load import LoadTarget, load_catalogue, load_into, opened
    from holdfast.store.read.validation import check_contents

    patterns = _names("load(optional", optional, "head.*")
    configure_logging()
    _require_torch(model)
    meant = find(path)
    for note in meant.notes():
        log.warning("holdfast: %s", note)
    state = TorchState(model, {})
    ours = state.names.extra
    needed = {fqn for fqn, module in ours.items() if module.get_extra_state() is not None}
    with hinted(CheckpointInvalid, repair_command(meant.path)), opened(meant.path) as source:
        catalogue, saved = load_catalogue(source), joined_values(source)
        values: dict[str, Any] = {"optimizers": {}, "schedulers": {}, "state": {}}
        values["modules"] = saved.get("modules", {})
        restore = state.restore(catalogue, values, cast=cast, partial=True)
        targets = [LoadTarget(m.fqn, m.box, m.dtype, data, m.shape) for m, data in restore.buffers()]
        wanted = {target.fqn for target in targets}
        known = beside_the_model(catalogue.by_fqn, saved) - wanted
        theirs = extra_states(saved)
        check_contents(source.directory, source.index, threads_of_rank(), names=wanted)
        report = load_into(
            source,
            targets,
            known=known,
            missing=sorted(needed - theirs),
            unexpected=sorted(theirs - ours.keys()),
            optional=patterns,
            strict=strict,
            first=restore.converted(),
            check=restore.check,
        )
    restore.finish(report.untouched)
    for healed in report.healed:
        log.warning("holdfast: %s (another copy was used; next: %s)", healed, repair_command(meant.path))
    return report


def _names(argument: str, value: object, example: str) -> tuple[str, ...]:
    """Return ``value`` as a tuple of strings. Raises: UsageError: ``value`` is not a list of strings."""
    if isinstance(value, Iterable) and not isinstance(value, str):
        names = tuple(value)
        if all(isinstance(name, str) for name in names):
            return names
    keyword = argument.partition("(")[2]
    raise UsageError(f"{argument}={value!r}): not a list of texts", hint=f"{keyword}=[{example!r}]")


def _torch_adapter(
    model: Any,
    optimizer: Any,
    scheduler: Any,
    scaler: Any,
    extras: dict[str, Any],
    seed: int,
    override: Sequence[str],
) -> Adapter:
    from holdfast.frameworks.torch.adapter import TorchAdapter
    from holdfast.frameworks.torch.comm.backend import untouched
    from holdfast.frameworks.torch.plain_adapter import PlainTorchAdapter

    kind = PlainTorchAdapter if untouched() else TorchAdapter
    adapter = kind(model, optimizer, scheduler, scaler, extras, seed)
    adapter.state.declared.choose(override)
    return adapter


def configure_logging() -> None:
    """Add a plain handler to the ``holdfast`` logger if the script has no log handler. The root logger stays unchanged.

    If the script has log handlers and all of them show the logger's name, messages lose their prefix ``holdfast:``.
    """
    if log.hasHandlers():
        if not any(isinstance(each, _Unprefixed) for each in log.filters):
            log.addFilter(_Unprefixed())
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


class _Unprefixed(logging.Filter):
    """A log filter that removes the prefix ``holdfast:`` if every handler of the record shows the logger's name."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Remove the prefix from ``record`` if all handlers show the logger's name. Return True to keep the record."""
        handlers = [*log.handlers, *(logging.getLogger().handlers if log.propagate else [])]
        if handlers and all(map(_shows_name, handlers)) and isinstance(record.msg, str):
            record.msg = record.msg.removeprefix(PREFIX)
        return True


def _shows_name(handler: logging.Handler) -> bool:
    text = getattr(handler.formatter, "_fmt", None) or ""
    return any(name in text for name in ("%(name)", "{name", "$name", "${name"))


def _require_torch(model: Any) -> None:
    """Check, without importing torch, that ``model`` is an object of torch or a dict of these. Raises: UsageError."""
    for item in model.values() if isinstance(model, Mapping) else [model]:
        if not any(base.__module__.split(".")[0] == "torch" for base in type(item).__mro__):
            raise UsageError(
                f"model is a {type(item).__module__}.{type(item).__qualname__}: no framework that Holdfast knows",
                hint="holdfast.session(model=a torch.nn.Module, ...)",
            )
