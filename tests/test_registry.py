"""The known models, and which of them a machine is told about."""

import os
import re

import pytest

from mlx_spec import memory
from mlx_spec_models.registry import KNOWN_MODELS, suggestions, usable_memory

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def test_every_model_has_a_name_of_its_own_and_a_repository() -> None:
    for names in (
        [model.name for model in KNOWN_MODELS],
        [model.repository for model in KNOWN_MODELS],
    ):
        assert len(set(names)) == len(names)
    for model in KNOWN_MODELS:
        for repository in (model.repository, model.draft_model, model.drafter):
            assert repository is None or REPOSITORY.fullmatch(repository)


@pytest.mark.parametrize(
    ("gigabytes", "best"),
    [
        (5.7, "OLMoE-1B-7B 4-bit"),
        (11.5, "Qwen1.5-MoE-A2.7B 4-bit"),
        (17.2, "gpt-oss-20b"),
        (22.9, "Qwen3-30B-A3B 4-bit"),
        (38.6, "Qwen3-30B-A3B 4-bit"),
        (77.3, "GLM-4.5-Air 4-bit"),
        (103.0, "gpt-oss-120b"),
        (400.0, "GLM-4.7 4-bit"),
    ],
)
def test_the_best_model_that_fits_comes_first(gigabytes: float, best: str) -> None:
    assert suggestions(int(gigabytes * 1e9))[0].name == best


@pytest.mark.parametrize("gigabytes", [0, 1, 5, 10, 20, 40, 80, 160, 1000])
def test_suggestions_leave_room_for_the_cache_and_keep_the_order(
    gigabytes: int,
) -> None:
    found = suggestions(gigabytes * 10**9)
    assert found == [model for model in KNOWN_MODELS if model in found]
    for model in KNOWN_MODELS:
        fits = model.weight_bytes <= 0.8 * gigabytes * 1e9
        assert (model in found) == fits


def test_a_device_says_how_much_memory_is_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "working_set_limit", lambda: 123)
    assert usable_memory() == 123


def test_without_its_word_all_memory_is_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "working_set_limit", lambda: None)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4, "SC_PHYS_PAGES": 5}.get)
    assert usable_memory() == 20
