"""A step that was aborted, healed and run again leaves no trace in the weights."""

from __future__ import annotations

import pytest
import torch

from holdfast.errors import UsageError
from holdfast.frameworks.torch.state.wrapper_reset import Scaling, effective_scaler, scalers_of
from tests.adapters import aborts
from tests.adapters.worlds import Worlds

pytestmark = [pytest.mark.torch, pytest.mark.processes]

KINDS = [*aborts.DDP_OPTIONS, *aborts.FSDP_OPTIONS]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_after_an_abort_equal_those_of_an_undisturbed_run(worlds: Worlds, kind: str) -> None:
    undisturbed = worlds.values(aborts.abort_and_retry, kind=kind, where="", how="raise")
    assert len(undisturbed) == 2
    for where in ("forward", "backward"):
        for how in ("raise", "poison", "both"):
            disturbed = worlds.values(aborts.abort_and_retry, kind=kind, where=where, how=how)
            assert disturbed == undisturbed, (where, how)


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_nothing_to_heal_before_the_first_forward(worlds: Worlds, kind: str) -> None:
    undisturbed = worlds.values(aborts.abort_and_retry, kind=kind, where="", how="raise")
    assert worlds.values(aborts.abort_and_retry, kind=kind, where="", how="raise", early=True) == undisturbed


def test_without_healing_fsdp2_goes_on_with_other_weights(worlds: Worlds) -> None:
    """This difference is the reason for healing.

    If a version of torch shows none, Holdfast's healing can be removed.
    """
    undisturbed = worlds.values(aborts.abort_and_retry, kind="fsdp2", where="", how="raise")
    retried = worlds.values(aborts.abort_and_retry, kind="fsdp2", where="backward", how="raise", healed=False)
    assert retried != undisturbed


@pytest.mark.parametrize("several", [False, True])
def test_a_pipeline_goes_on_as_if_nothing_had_been(worlds: Worlds, several: bool) -> None:
    undisturbed = worlds.values(aborts.pipeline_retry, several=several, where="")
    for where in ("forward", "backward"):
        assert worlds.values(aborts.pipeline_retry, several=several, where=where) == undisturbed
    unhealed = worlds.run(aborts.pipeline_retry, 2, several=several, where="backward", healed=False)
    assert [result.get("value") for result in unhealed] != undisturbed


def test_scaler_does_not_step_with_scaled_gradients(worlds: Worlds) -> None:
    undisturbed = worlds.values(aborts.scaler_retry, 1, aborted=False, healed=False)
    assert worlds.values(aborts.scaler_retry, 1, aborted=True, healed=True) == undisturbed
    assert worlds.values(aborts.scaler_retry, 1, aborted=True, healed=False) != undisturbed


@pytest.mark.parametrize(("static", "passes"), [(False, 2), (True, 3)])
def test_rehearsed_process_sums_in_the_order_of_the_undisturbed_run(
    worlds: Worlds, static: bool, passes: int
) -> None:
    live = worlds.values(aborts.rehearse, 4, fresh_at=-1, rehearsals=False, static=static)
    rehearsed = worlds.values(aborts.rehearse, 4, fresh_at=4, rehearsals=True, static=static)
    fresh = worlds.values(aborts.rehearse, 4, fresh_at=4, rehearsals=False, static=static)
    assert [r["passes"] for r in rehearsed] == [passes] * 4
    assert [r["digest"] for r in rehearsed] == [r["digest"] for r in live]
    assert [r["digest"] for r in fresh] != [r["digest"] for r in live]


def test_a_scaler_that_the_session_does_not_have_is_refused_by_name() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler = torch.amp.GradScaler("cpu")
    other = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]
    none, other_one, extra = Scaling(None, {}), Scaling(other, {}), Scaling(other, {"second": scaler})
    none.refuse_others([optimizer])
    scaler.unscale_(optimizer)
    extra.refuse_others([optimizer])
    for scaling in (none, other_one):
        with pytest.raises(UsageError, match="a GradScaler scales the gradients of the session's optimizer"):
            scaling.settle([optimizer])
    scaler.step(optimizer)
    scaler.update()
    none.settle([optimizer])


def test_a_disabled_scaler_is_no_scaler() -> None:
    """A disabled scaler lacks most attributes. Without CUDA, torch disables each scaler that is made for CUDA."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.1)
    disabled, enabled = torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu")
    assert effective_scaler(disabled) is None and effective_scaler(enabled) is enabled
    disabled.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]
    disabled.unscale_(optimizer)
    Scaling(None, {}).settle([optimizer])


def test_a_second_scaler_in_the_state_is_reset_as_well() -> None:
    """Regression: after an abort between ``unscale_`` and ``update``, the next run of the block raised an error."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler, disabled = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    scaling = Scaling(None, {"second": scaler, "disabled": disabled, "number": 1})
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        scaling.heal()
    assert scalers_of(disabled, {}) == [] and scalers_of(scaler, {"number": 1}) == [scaler]
