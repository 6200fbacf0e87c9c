"""Drafters against the reference: the tokens they draft, and every q they give."""

from random import Random

import numpy as np
import pytest

from mlx_spec import Decoder, DraftBlock, ModelConfig, SamplingParams
from mlx_spec.draft import Drafter, FeatureDrafter, SamplingDrafter
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.mtp import MTPHead
from mlx_spec.target import Features
from tests import heads
from tests.heads import KINDS, TARGET, V, new_drafter
from tests.reference_drafters import (
    REFERENCES,
    Array,
    Seen,
    as_numpy,
    best,
    in_turn,
    softmax,
)

LENGTHS = (2, 3, 17, 40)
COUNT = 5
PUBLISHED = {
    "mtp": heads.mtp,
    "eagle3": heads.eagle3,
    "dflash": heads.dflash,
    "dflash2": lambda: heads.dflash(2),
}


@pytest.fixture(scope="module")
def target() -> Decoder:
    return Decoder.random(ModelConfig.from_hf(TARGET), 3)


def history_of(length: int) -> list[int]:
    rng = Random(length)
    return [rng.randrange(V) for _ in range(length)]


def propose(drafter: Drafter, target: Decoder, history: list[int]) -> DraftBlock:
    assert isinstance(drafter, FeatureDrafter)
    rows = target.forward(history[:-1], 0, target.new_cache(), taps=drafter.taps)
    drafter.observe(history, Features(0, rows.hidden, rows.taps))
    block = drafter.propose(history, None, COUNT)
    assert len(block) == COUNT
    return block


def dense(block: DraftBlock) -> Array:
    rows = np.zeros((len(block), V))
    for row, dist in zip(rows, block.dists, strict=True):
        for token, probability in dist.support:
            row[token] = probability
    return rows


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_drafts_are_the_references(
    kind: str, length: int, target: Decoder
) -> None:
    history = history_of(length)
    config, tensors = PUBLISHED[kind]()
    seen = Seen.of(target, history, heads.TAPS)
    expected, _ = REFERENCES[kind](config, as_numpy(tensors), seen, COUNT, best)
    block = propose(new_drafter(kind, target), target, history)
    assert block.tokens == expected


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_q_is_the_references_for_the_tokens_before_it(
    kind: str, length: int, target: Decoder
) -> None:
    history = history_of(length)
    config, tensors = PUBLISHED[kind]()
    drafter = new_drafter(kind, target)
    assert isinstance(drafter, SamplingDrafter)
    for seed in (1, 2):
        drafter.follow(SamplingParams(0.8), seed, False, V)
        block = propose(drafter, target, history)
        seen = Seen.of(target, history, heads.TAPS)
        _, rows = REFERENCES[kind](
            config, as_numpy(tensors), seen, COUNT, in_turn(block.tokens)
        )
        expected = softmax(np.array(rows) / 0.8)
        assert np.abs(dense(block) - expected).max() < 1e-4
        assert all(expected[i, token] > 0 for i, token in enumerate(block.tokens))


def test_a_head_that_copies_the_checkpoints_is_the_targets(target: Decoder) -> None:
    history = history_of(17)
    config, tensors = heads.mtp()
    tensors["lm_head.weight"] = tensors["model.layers.5.shared_head.head.weight"]
    drafter = ChainDrafter(MTPHead(config, tensors, "a test", target, None), V, COUNT)
    seen = Seen.of(target, history, ())
    lent = as_numpy(heads.mtp()[1])
    lent["model.layers.5.shared_head.head.weight"] = seen.head(np.eye(heads.H)).T
    expected, _ = REFERENCES["mtp"](config, lent, seen, COUNT, best)
    assert propose(drafter, target, history).tokens == expected
