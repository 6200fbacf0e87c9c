"""Drafters against the reference: the tokens they draft, and every q they give."""

from collections.abc import Callable
from functools import partial
from random import Random

import numpy as np
import pytest

from mlx_spec import Decoder, DraftBlock, ModelConfig, SamplingParams
from mlx_spec.draft import Drafter, FeatureDrafter, SamplingDrafter
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.mtp import MTPHead
from mlx_spec.target import Features
from tests import heads
from tests.heads import TARGET, V
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
EAGLE3_EXTRAS = (
    "input_norm",
    "fc_norm",
    "norm_output",
    "norm_before_residual",
    "embed_tokens",
)
DFLASH_EXTRAS = (
    "mask_embedding",
    "sinks",
    "sliding",
    "sliding-both-ways",
    "causal",
    "interleaved",
)
DSPARK_EXTRAS = ("own", "reduced", "capped", "anchorless")

CASES: dict[tuple[str, str], Callable[[], heads.Published]] = {
    **{(kind, ""): made for kind, made in heads.PUBLISHED.items()},
    **{("eagle3", x): partial(heads.eagle3, extra=x) for x in EAGLE3_EXTRAS},
    **{("dflash", x): partial(heads.dflash, 1, x) for x in DFLASH_EXTRAS},
    ("dflash2", "sliding"): partial(heads.dflash, 2, "sliding"),
    **{("dspark", kind): partial(heads.dspark, kind) for kind in ("gated", "rnn")},
    **{("dspark", x): partial(heads.dspark, "rnn", x) for x in DSPARK_EXTRAS},
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
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_greedy_drafts_are_the_references(
    case: tuple[str, str], length: int, target: Decoder
) -> None:
    history = history_of(length)
    config, tensors = CASES[case]()
    seen = Seen.of(target, history, heads.TAPS)
    reference = REFERENCES[case[0]]
    expected, _ = reference(config, as_numpy(tensors), seen, COUNT, best)
    block = propose(heads.build(case[0], (config, tensors), target), target, history)
    assert block.tokens == expected


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_each_q_is_the_references_for_the_tokens_before_it(
    case: tuple[str, str], length: int, target: Decoder
) -> None:
    history = history_of(length)
    config, tensors = CASES[case]()
    numbers = as_numpy(tensors)
    drafter = heads.build(case[0], (config, tensors), target)
    assert isinstance(drafter, SamplingDrafter)
    for seed in (1, 2):
        drafter.follow(SamplingParams(0.8), seed, False, V)
        block = propose(drafter, target, history)
        seen = Seen.of(target, history, heads.TAPS)
        given = in_turn(block.tokens)
        _, rows = REFERENCES[case[0]](config, numbers, seen, COUNT, given)
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
