"""Tracebacks: frames of Holdfast are folded to one line, unless the mistake is Holdfast's."""

from __future__ import annotations

import traceback

import pytest

from holdfast.errors import UsageError
from holdfast.runtime.node.traceback_folding import OWN, is_own_mistake, without_own_frames
from holdfast.store.format.json_values import encode_values
from holdfast.store.manage.retention import save_policies

MARKS = "           ^^^^^^^^"


def frame(file: str, mark: str = "") -> str:
    return f"""{mark}  File "{file}", line 5, in run
{mark}    call(again)
{mark}{MARKS}"""


@pytest.mark.parametrize("mark", ["", "[rank0]: ", "  | "])
def test_frames_in_a_row_are_one_line(mark: str) -> None:
    user, own, torch = (
        frame(file, mark) for file in ("/home/u/train.py", f"{OWN}session/steps/step.py", "/x/torch/nn.py")
    )
    head, last = f"{mark}Traceback (most recent call last):", f"{mark}ValueError: no"
    again = f"{mark}  [Previous line repeated 3 more times]"
    text = "\n".join((head, user, own, own, again, torch, own, user, own, own, own, last)) + "\n"
    folded = (f"{mark}  ... 2 frames of Holdfast", torch, own, user, f"{mark}  ... 3 frames of Holdfast")
    assert without_own_frames(text) == "\n".join((head, user, *folded, last)) + "\n"


def test_what_is_no_traceback_stays() -> None:
    for text in ("", "\n", "no traceback\n  at all", 'File "x", line 3\n    text\n'):
        assert without_own_frames(text) == text


def test_an_exception_of_two_causes() -> None:
    def refused() -> None:
        try:
            save_policies("5m", None, None)
        except UsageError as error:
            raise ValueError("of the script") from error

    with pytest.raises(ValueError, match="of the script") as raised:
        refused()
    text = without_own_frames("".join(traceback.format_exception(raised.value)))
    assert text.count("frames of Holdfast") == 1 and text.count(__file__) == 3
    assert not is_own_mistake(raised.value)


def test_a_mistake_of_holdfast_is_known() -> None:
    with pytest.raises(UsageError) as refused:
        save_policies("5m", None, None)
    assert not is_own_mistake(refused.value)
    with pytest.raises(TypeError) as broken:
        encode_values()  # type: ignore[call-arg]
    assert not is_own_mistake(broken.value)  # the mistake is in the call, which is outside of Holdfast
