"""The random generators that a script's variables hold."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from holdfast.frameworks.torch.steps.script_generators import digest_of_generator, generators_in

pytestmark = pytest.mark.torch


def test_generators_are_found_in_the_objects_of_a_library() -> None:
    games = SimpleNamespace(envs=[SimpleNamespace(env=SimpleNamespace(_np_random=np.random.default_rng(1)))])
    variables: dict[str, object] = {
        "games": games,
        "noise": torch.Generator(),
        "old": np.random.RandomState(1),
        "python": random.Random(1),
        "same": games.envs[0].env._np_random,
    }
    assert set(generators_in(variables, ())) == {"noise", "old", "python", "same"}
    del variables["same"]
    assert "games.envs[0].env._np_random" in generators_in(variables, ())


def test_generators_that_the_session_seeds_are_left_out() -> None:
    own = torch.Generator()
    data = TensorDataset(torch.zeros(2))
    loader = DataLoader(data, sampler=RandomSampler(data, generator=torch.Generator()), generator=own)
    variables: dict[str, object] = {
        "loader": loader,
        "default": torch.default_generator,
        "old": np.random.mtrand._rand,
        "python": random._inst,
        "kept": {"noise": (noise := random.Random(1))},
        "system": random.SystemRandom(),
    }
    assert not generators_in(variables, (id(noise),))


@pytest.mark.parametrize(
    "kind", [np.random.default_rng, np.random.RandomState, random.Random, torch.Generator]
)
def test_each_draw_changes_the_digest(kind: type) -> None:
    made = kind() if kind is torch.Generator else kind(1)
    before = digest_of_generator(made)
    assert digest_of_generator(made) == before
    if isinstance(made, torch.Generator):
        torch.rand(1, generator=made)
    else:
        made.random()
    assert digest_of_generator(made) != before


def test_another_object_is_no_generator() -> None:
    with pytest.raises(TypeError, match="int is no random generator"):
        digest_of_generator(3)
