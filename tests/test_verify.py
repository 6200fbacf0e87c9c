"""The acceptance rule, alone and over whole blocks."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_spec import DraftDist, Sampler, accept_or_resample, verify_block
from mlx_spec.verify import match_block

TARGET = np.array([0.4, 0.25, 0.2, 0.1, 0.05, 0.0])
DRAFTS = {
    "wrong": DraftDist.from_dense([0.02, 0.03, 0.05, 0.1, 0.3, 0.5]),
    "deterministic": DraftDist.deterministic(2),
    "support missing most": DraftDist.from_support([(3, 0.7), (4, 0.3)]),
    "perfect": DraftDist.from_dense(TARGET),
}


def test_a_draft_at_least_as_likely_under_the_target_is_always_accepted() -> None:
    draft = DraftDist.from_dense([0.4, 0.2, 0.2, 0.1, 0.05, 0.05])
    for seed in range(500):
        for token in range(5):
            assert accept_or_resample(TARGET, draft, token, Sampler(seed)) is None


def test_a_draft_the_target_rules_out_is_never_accepted_nor_resampled() -> None:
    draft = DraftDist.from_dense([0.1, 0.1, 0.1, 0.1, 0.1, 0.5])
    found = {accept_or_resample(TARGET, draft, 5, Sampler(s)) for s in range(2_000)}
    assert None not in found
    assert 5 not in found


def test_a_token_the_drafter_rules_out_is_accepted() -> None:
    draft = DraftDist.deterministic(0)
    assert accept_or_resample(TARGET, draft, 1, Sampler(0)) is None


class StubSampler(Sampler):
    """Gives one number for every test and draws from what it is handed."""

    def __init__(self, number: float) -> None:
        super().__init__(0)
        self.number = number
        self.weights: list[np.ndarray] = []

    def uniform(self) -> float:
        return self.number

    def sample_from(self, probs: object) -> int:
        self.weights.append(np.array(probs))
        return super().sample_from(np.array(probs))


def test_the_residual_is_what_the_target_has_more_than_the_draft() -> None:
    rng = StubSampler(0.999)
    accept_or_resample(TARGET, DRAFTS["wrong"], 5, rng)
    expected = [0.38, 0.22, 0.15, 0, 0, 0]
    assert np.allclose(rng.weights[0], expected, atol=1e-6)


def test_an_empty_residual_falls_back_to_the_target() -> None:
    rng = StubSampler(0.999)
    over = DraftDist.from_dense([0.5, 0.5])
    accept_or_resample([0.5, 0.4], over, 1, rng)
    assert np.allclose(rng.weights[0], [0.5, 0.4])


@pytest.mark.parametrize("name", DRAFTS)
def test_the_rule_reproduces_the_target(name: str) -> None:
    draws, draft = 200_000, DRAFTS[name]
    dense = np.array([draft.prob(token) for token in range(len(TARGET))])
    rng = Sampler(11)
    drafted = np.random.default_rng(5).choice(
        len(TARGET), size=draws, p=dense / dense.sum()
    )
    counts = np.zeros(len(TARGET))
    for token in drafted.tolist():
        result = accept_or_resample(TARGET, draft, token, rng)
        counts[token if result is None else result] += 1
    distance = 0.5 * np.abs(counts / draws - TARGET).sum()
    # The expected distance of 200,000 fair draws is 0.0016; 0.01 is 15 sigma away.
    assert distance < 0.01


@st.composite
def blocks(draw: st.DrawFn) -> tuple[np.ndarray, list[int], list[DraftDist], int]:
    vocab = draw(st.integers(2, 9))
    length = draw(st.integers(0, 5))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(vocab, 0.5), size=length + 1).astype(np.float32)
    p[rng.random(p.shape) < 0.2] = 0
    p[p.sum(axis=1) == 0] = 1
    p /= p.sum(axis=1, keepdims=True)
    is_point = draw(st.booleans())
    tokens, dists = [], []
    for _ in range(length):
        q = rng.dirichlet(np.full(vocab, 0.5)).astype(np.float32)
        token = int(rng.choice(vocab, p=q / q.sum()))
        tokens.append(token)
        point = DraftDist.deterministic(token)
        dists.append(point if is_point else DraftDist.from_dense(q))
    return p, tokens, dists, seed


class FixedDraws(Sampler):
    """One number for the test and one for the draw, as the block rule gets them."""

    def __init__(self, accept: float, chosen: float) -> None:
        super().__init__(0)
        self._numbers = [accept, chosen]

    def uniform(self) -> float:
        return self._numbers.pop(0)


def one_by_one(
    p: np.ndarray,
    tokens: list[int],
    dists: list[DraftDist],
    accept: list[float],
    chosen: list[float],
) -> tuple[int, int]:
    for i, (token, dist) in enumerate(zip(tokens, dists, strict=True)):
        rng = FixedDraws(accept[i], chosen[i])
        result = accept_or_resample(p[i], dist, token, rng)
        if result is not None:
            return i, result
    bonus = FixedDraws(chosen[-1], 0)
    return len(tokens), bonus.sample_from(p[-1])


@given(blocks())
def test_verify_block_equals_the_rule_token_by_token(
    block: tuple[np.ndarray, list[int], list[DraftDist], int],
) -> None:
    p, tokens, dists, seed = block
    numbers = np.random.default_rng(seed + 1).random((2, len(tokens) + 1))
    accept, chosen = np.floor(numbers * 2**23) / 2**23
    dense = np.zeros((len(tokens), p.shape[1]), np.float32)
    for row, dist in zip(dense, dists, strict=True):
        for token, probability in dist.support:
            row[token] = probability
    is_point = all(dist.is_deterministic for dist in dists)
    verdict = verify_block(
        mx.array(p),
        mx.array(tokens, mx.int32),
        None if is_point else mx.array(dense),
        mx.array(accept[:-1], mx.float32),
        mx.array(chosen, mx.float32),
    )
    expected = one_by_one(p, tokens, dists, accept.tolist(), chosen.tolist())
    assert (verdict.num_accepted.item(), verdict.next_token.item()) == expected


@pytest.mark.parametrize(
    ("samples", "drafted", "accepted", "following"),
    [
        ([5, 6, 7, 8], [5, 6, 7], 3, 8),
        ([5, 6, 7, 8], [5, 9, 7], 1, 6),
        ([5, 6, 7, 8], [1, 6, 7], 0, 5),
        ([5], [], 0, 5),
    ],
)
def test_match_block_accepts_what_the_target_chose(
    samples: list[int], drafted: list[int], accepted: int, following: int
) -> None:
    verdict = match_block(mx.array(samples, mx.int32), mx.array(drafted, mx.int32))
    assert verdict.num_accepted.item() == accepted
    assert verdict.next_token.item() == following
