"""State in attributes of modules that a model of torch contains: no call in the script leads to these modules.

Regression: a replacement began with the initial values of such attributes. The job ended with other weights, and with
exit code 0.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from tests.session.launch import run_job, run_undisturbed_and_killed

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("deep_job.py"))


@pytest.mark.parametrize(("form", "owner"), [("attributes", ""), ("helpers", "fall.")])
def test_an_attribute_that_each_pass_changes_is_refused_by_its_name(
    tmp_path: Path, form: str, owner: str
) -> None:
    done = run_job(tmp_path, 2, JOB, form)
    assert done.returncode == Exit.BAD_INPUT, done.stdout
    for name in (f"model.module.0.0.{owner}passes", f"model.module.0.1.blocks.1.{owner}passes"):
        assert name in done.stdout
    assert "register_buffer" in done.stdout, done.stdout


@pytest.mark.parametrize(("form", "name"), [("in_dict", 'nets["g"]'), ("in_list", "models[0]")])
def test_a_model_in_a_container_of_the_script_is_searched(tmp_path: Path, form: str, name: str) -> None:
    """Regression: a job whose script has its models in a dict or list ended with other weights and exit code 0."""
    done = run_job(tmp_path, 2, JOB, form)
    assert done.returncode == Exit.BAD_INPUT and f"{name}.module.0.0.passes" in done.stdout, done.stdout


@pytest.mark.parametrize("form", ["buffers", "harmless", "outermost"])
def test_buffers_and_harmless_attributes_are_exact_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    assert "depend" not in run_undisturbed_and_killed(tmp_path, monkeypatch, "1:5,0:8", JOB, form)


def test_statistics_in_a_module_of_a_library_are_named(tmp_path: Path) -> None:
    """Regression: a replacement began with the running mean of its first batch, exit code 0, and no word.

    What a pass sets before it reads it, and a table that only grows, are not named.
    """
    done = run_job(tmp_path, 2, str(Path(JOB).with_name("normalized_job.py")))
    named = re.findall(r"a module of a library may depend on (.*) \(normalized_job.py", done.stdout)
    assert done.returncode == 0 and named == ["model.module.0.count", "model.module.0.mean"], done.stdout
