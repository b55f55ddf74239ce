"""The two public functions: ``holdfast.session`` and ``holdfast.load``."""

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
        model: a module as it is trained (DDP, ``fully_shard``, compiled), or a dict of them; extra state is included.
        optimizer, scheduler: one, a list, or a dict by name. scaler: a ``GradScaler``.
        checkpoint: directory of checkpoints, or ``s3://bucket/prefix``; default under ``holdfast run``: the run's own.
        resume: ``auto`` (the newest valid checkpoint, else fresh), ``never`` (fresh), a checkpoint, a
            directory of them (or a URL), or ``DIRECTORY@STEP``. seed: of all random numbers of the steps.
        save: when to save beside training: a number of steps, a ``timedelta``, ``"auto"`` (the interval that costs
            least), a policy or a function of a ``Moment`` (``store.manage.retention``), or a list. None: only at
            ``session.save()``. save_every_steps, save_every_s: the same as a number of steps or seconds.
        keep: valid checkpoints of this run and the runs it continues that stay: a number, those of a ``timedelta``, a
            policy (``store.manage.retention``) or a list. copies: with 2, any one file may be lost.
        memory: steps between two states of each rank in shared memory that outlives it; None: ``--memory-every``.
        state: further objects with ``state_dict``/``load_state_dict``, generators or plain values, by name. Tensors,
            arrays and containers are filled in place; a number or text is only replaced in ``s.state["name"]``. They
            are the job's: any rank's are saved (``Session.own`` is one rank's). A block that does not count has its
            changes undone; change iterables and objects of more than 65536 numbers only after ``optimizer.step()``.
        exit_file: JSON file in which the user asks for a graceful exit by ``{"GracefulExit": 1}``.
        verify_block: steps between two checks that a block repeats exactly (ImpureBlockError if not); 0: no check.
        verify_data: a resumed process compares the batches that it draws with those drawn before (DataError).
        verify_ranks: steps between two checks that other ranks compute the same from the batch of each; 0: none.
        nonfinite: when an optimizer is about to use gradients with inf or nan: ``stop`` before it (NonFiniteError),
            ``skip`` the update on all ranks, ``warn`` once and keep the newest checkpoint before, or ``ignore``.
        override: hyperparameters (``["lr", "gamma"]``) that a resume takes from the script if changed there; of others
            the checkpoint's stay, and both are reported. A learning rate moved by a schedule keeps that factor.
        grace_s: after a signal or exit file, leave after this many seconds even without a checkpoint.

    Raises (for an argument that cannot work: in this call; the rest when the session is entered):
        UsageError, StateError: an argument that cannot work; a part of the state that cannot be saved, by key path.
        UnsupportedError: an optimizer, wrapper, hook or process group that is refused. NonFiniteError: ``nonfinite``.
        NothingToResume, CheckpointMismatch: see ``session.checkpoints.resume``. StoreWriteError: no place to write.
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
    """Load verified weights of a checkpoint into ``model``, without a session.

    Args:
        path: a checkpoint, a directory of checkpoints (the newest valid one is taken), or ``DIRECTORY@STEP``.
        model: a module or a dict of modules, as given to the session that saved.
        strict: refuse a checkpoint that lacks a parameter, buffer or extra state (other than None) of the model, or has
            an additional one.
        optional: name patterns (``head.*``) of tensors that ``strict`` does not check. Such a tensor may be missing on
            either side, or have another shape or dtype; the model then keeps its own.
        cast: convert floating numbers to the model's dtype. A number that the dtype cannot hold is an error.

    Returns:
        A report; its ``missing``, ``unexpected`` and ``mismatched`` name the tensors that were left out.

    Raises:
        UsageError: ``path`` does not exist, or an argument has the wrong type.
        NothingToResume: no valid checkpoint is there.
        CheckpointInvalid: a part that the model needs is damaged and has no copy; the model is unchanged.
        CheckpointMismatch: another model; the first differences are listed and the model is unchanged.
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
    """Return a checked list of texts. Raises: UsageError."""
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
    """Give the ``holdfast`` logger a plain handler if the script has configured none. The root logger stays unchanged.

    If a handler of the script shows the name of the logger, its lines come without the prefix ``holdfast:``.
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
    """A filter that removes ``holdfast:`` from a line if every handler of the line shows the logger's name."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record. Return True: every record is kept."""
        handlers = [*log.handlers, *(logging.getLogger().handlers if log.propagate else [])]
        if handlers and all(map(_shows_name, handlers)) and isinstance(record.msg, str):
            record.msg = record.msg.removeprefix(PREFIX)
        return True


def _shows_name(handler: logging.Handler) -> bool:
    text = getattr(handler.formatter, "_fmt", None) or ""
    return any(name in text for name in ("%(name)", "{name", "$name", "${name"))


def _require_torch(model: Any) -> None:
    """Refuse a model that is no module of torch, before torch is imported. Raises: UsageError."""
    for item in model.values() if isinstance(model, Mapping) else [model]:
        if not any(base.__module__.split(".")[0] == "torch" for base in type(item).__mro__):
            raise UsageError(
                f"model is a {type(item).__module__}.{type(item).__qualname__}: no framework that Holdfast knows",
                hint="holdfast.session(model=a torch.nn.Module, ...)",
            )
