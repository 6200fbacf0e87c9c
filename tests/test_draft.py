"""Draft blocks and distributions, and the draft model's cache."""

from collections.abc import Sequence

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_spec import (
    DraftBlock,
    DraftDist,
    DraftModelDrafter,
    Sampler,
    SamplingParams,
    SpecError,
    SpeculativeDecodeResult,
    SpeculativeOptions,
    sampling_distribution,
    speculative_decode,
    speculative_stream,
)
from mlx_spec.drafters.sampler import DraftSampler
from mlx_spec.sampling import Purpose
from tests.fakes import Pair, RecordingDrafter, tiny_decoder


def test_deterministic_is_a_point_mass() -> None:
    dist = DraftDist.deterministic(3)
    assert dist.support == ((3, 1.0),)
    assert (dist.prob(3), dist.prob(4)) == (1.0, 0.0)
    assert dist.is_deterministic


def test_dense_and_support_forms_agree() -> None:
    dense = DraftDist.from_dense([0.0, 0.25, 0.0, 0.75])
    support = DraftDist.from_support([(1, 0.25), (3, 0.75)])
    mapping = DraftDist.from_support({1: 0.25, 3: 0.75, 0: 0.0})
    array = DraftDist.from_dense(mx.array([0.0, 0.25, 0.0, 0.75]))
    assert dense.support == support.support == mapping.support == array.support
    assert not dense.is_deterministic


@pytest.mark.parametrize(
    "bad", [[0.5, 0.2], [1.5, -0.5], [0.0, 0.0], [float("nan"), 1.0]]
)
def test_what_is_no_distribution_is_refused(bad: list[float]) -> None:
    with pytest.raises(SpecError, match="sum to"):
        DraftDist.from_dense(bad)


def test_blocks_pair_tokens_with_distributions() -> None:
    dists = [DraftDist.deterministic(1), DraftDist.from_dense([0.5, 0.5])]
    block = DraftBlock.new([1, 0], dists)
    assert block.tokens == [1, 0]
    assert block.dists == dists
    assert len(block) == 2
    assert len(DraftBlock.empty()) == 0
    assert DraftBlock.empty().tokens == []


@pytest.mark.parametrize("count", [0, 1, 3])
def test_unequal_lengths_are_refused(count: int) -> None:
    with pytest.raises(SpecError, match="2 draft tokens"):
        DraftBlock.new([1, 2], [DraftDist.deterministic(1)] * count)


def test_truncate_shortens_everything() -> None:
    block = DraftBlock.deterministic([4, 5, 6])
    assert block.truncate(2) is block
    assert block.tokens == [4, 5]
    assert [d.support for d in block.dists] == [((4, 1.0),), ((5, 1.0),)]
    assert block.token_array.tolist() == [4, 5]
    assert block.truncate(9).tokens == [4, 5]


def test_blocks_on_the_device_read_like_any_other() -> None:
    q = mx.array([[0.25, 0.75], [1.0, 0.0]])
    block = DraftBlock.on_device(mx.array([1, 0], mx.int32), q)
    assert block.tokens == [1, 0]
    assert block.dists[0].prob(1) == 0.75
    padded = block.q_rows(4)
    assert padded is not None
    assert padded.tolist() == [[0.25, 0.75, 0, 0], [1, 0, 0, 0]]
    point = DraftBlock.on_device(mx.array([1], mx.int32), None)
    assert point.q_rows(4) is None
    assert point.dists[0].support == ((1, 1.0),)


def test_q_rows_are_left_out_only_for_point_masses_on_their_tokens() -> None:
    assert DraftBlock.deterministic([1, 2]).q_rows(4) is None
    elsewhere = DraftBlock.new([1], [DraftDist.deterministic(2)])
    rows = elsewhere.q_rows(4)
    assert rows is not None
    assert rows.tolist() == [[0, 0, 1, 0]]


VOCAB = 50
PARAMS = SamplingParams(temperature=0.9, top_p=0.8, repetition_penalty=1.2)


@given(
    histories=st.lists(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=25),
        min_size=1,
        max_size=6,
    ),
    budgets=st.lists(st.integers(1, 6), min_size=6, max_size=6),
)
def test_a_draft_model_proposes_as_if_it_had_been_rebuilt(
    histories: list[list[int]], budgets: list[int]
) -> None:
    decoder = DRAFT
    lasting = DraftModelDrafter(None, Pair(decoder), 6)
    for history, budget in zip(histories, budgets, strict=False):
        rebuilt = DraftModelDrafter(None, Pair(decoder), 6)
        for drafter in (lasting, rebuilt):
            drafter.follow(PARAMS, 7, False, VOCAB)
        found = lasting.propose(history, None, budget)
        expected = rebuilt.propose(history, None, budget)
        assert found.tokens == expected.tokens


DRAFT = tiny_decoder(VOCAB, seed=6)


@given(rounds=st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_a_draft_model_stays_in_step_through_rounds(rounds: list[int]) -> None:
    lasting = DraftModelDrafter(None, Pair(DRAFT), 4)
    history = [1, 2, 3]
    for accepted in rounds:
        block = lasting.propose(history, None, 4)
        fresh = DraftModelDrafter(None, Pair(DRAFT), 4).propose(history, None, 4)
        assert block.tokens == fresh.tokens
        history = [*history, *block.tokens[:accepted], 40 + len(history) % 10]


def test_q_is_what_the_draft_model_really_drew_from() -> None:
    drafter = DraftModelDrafter(None, Pair(DRAFT), 4)
    drafter.follow(PARAMS, 3, False, VOCAB)
    history = [1, 2, 3, 4]
    block = drafter.propose(history, None, 4)
    q = block.q_rows(VOCAB)
    assert q is not None
    tokens = [*history]
    for token, row in zip(block.tokens, q, strict=True):
        logits = DRAFT.forward_batch(tokens, 0, DRAFT.new_cache())[-1]
        expected = sampling_distribution(logits, PARAMS, tokens)
        assert mx.allclose(row, expected, atol=1e-5)
        assert row[token].item() > 0
        tokens.append(token)


def test_a_draft_model_stops_at_the_end_of_its_context() -> None:
    decoder = tiny_decoder(VOCAB)
    decoder.config = decoder.config.replace(max_position_embeddings=10)
    drafter = DraftModelDrafter(None, Pair(decoder), 4)
    assert len(drafter.propose(list(range(7)), None, 4)) == 3
    assert len(drafter.propose(list(range(10)), None, 4)) == 0
    assert len(drafter.propose(list(range(20)), None, 4)) == 0


BIASED = SamplingParams(
    temperature=1, frequency_penalty=0.2, logit_bias={40: 3.0}, penalty_context=4
)


@pytest.mark.parametrize("params", [SamplingParams(), PARAMS, BIASED])
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("draft_vocab", [30, 64])
def test_a_draft_model_of_another_size_stays_inside_both_vocabularies(
    draft_vocab: int, rule: str, params: SamplingParams
) -> None:
    target = tiny_decoder(VOCAB)
    drafter = DraftModelDrafter(None, Pair(tiny_decoder(draft_vocab, seed=8)), 5)
    options = SpeculativeOptions(60, sampling=params, rule=rule)  # type: ignore[arg-type]
    prompt = [1, 45, 2, 49] if draft_vocab > VOCAB else [1, 2, 3]
    plain = speculative_decode(target, prompt, None, options)
    result = speculative_decode(target, prompt, drafter, options)
    assert result.tokens_generated == 60
    if draft_vocab > VOCAB:
        assert result.drafted_tokens > 0
    if rule == "coupled" or params.is_greedy:
        assert result.generated_tokens == plain.generated_tokens


def test_tokens_the_target_does_not_have_are_refused() -> None:
    target = tiny_decoder(VOCAB)
    for token in (VOCAB, -1):
        with pytest.raises(SpecError, match=f"no token {token}"):
            speculative_decode(target, [1, token])
        with pytest.raises(SpecError, match=f"token {token}"):
            speculative_decode(target, [1], RecordingDrafter([[token]]))
    biased = SpeculativeOptions(sampling=SamplingParams(logit_bias={VOCAB: 1.0}))
    with pytest.raises(SpecError, match="logit_bias names token 50"):
        speculative_decode(target, [1], None, biased)


class WideDrafter:
    """Draws from more tokens than the target has."""

    def __init__(self, is_on_device: bool) -> None:
        self._is_on_device = is_on_device

    def propose(
        self, history: Sequence[int], target_hidden: mx.array | None, max_len: int
    ) -> DraftBlock:
        if self._is_on_device:
            return DraftBlock.on_device(mx.array([1]), mx.ones((1, 60)) / 60)
        return DraftBlock.new([1], [DraftDist.from_support({1: 0.5, 55: 0.5})])


@pytest.mark.parametrize("is_on_device", [True, False])
def test_a_wider_q_than_the_targets_vocabulary_is_refused(is_on_device: bool) -> None:
    options = SpeculativeOptions(sampling=SamplingParams(temperature=1))
    with pytest.raises(SpecError, match="vocabulary"):
        speculative_decode(tiny_decoder(VOCAB), [1], WideDrafter(is_on_device), options)


class OnDevice:
    """Proposes tokens the host has not seen."""

    def __init__(self, token: int) -> None:
        self._token = token

    def propose(
        self, history: Sequence[int], target_hidden: mx.array | None, max_len: int
    ) -> DraftBlock:
        return DraftBlock.on_device(mx.array([self._token] * 2, mx.int32), None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("token", [VOCAB, 10**7, -1])
def test_foreign_tokens_on_the_device_are_refused_and_leave_the_cache_whole(
    token: int, temperature: float
) -> None:
    target = tiny_decoder(VOCAB)
    cache = target.new_cache()
    options = SpeculativeOptions(12, sampling=SamplingParams(temperature))
    stream = speculative_stream(target, cache, [1, 2, 3], OnDevice(token), options)
    next(stream)
    with pytest.raises(SpecError, match=f"proposes token {token}"):
        next(stream)
    assert cache.seq_len == 3


class Impossible:
    """Proposes a token that its own distribution rules out."""

    def propose(
        self, history: Sequence[int], target_hidden: mx.array | None, max_len: int
    ) -> DraftBlock:
        return DraftBlock.new([7], [DraftDist.deterministic(8)])


def test_a_token_its_own_distribution_rules_out_is_refused() -> None:
    options = SpeculativeOptions(sampling=SamplingParams(1.0, top_k=2))
    with pytest.raises(SpecError, match="token 7 with probability 0"):
        speculative_decode(tiny_decoder(VOCAB), [1], Impossible(), options)


def test_padding_of_the_target_does_not_change_the_shared_noise() -> None:
    target = tiny_decoder(VOCAB)
    same = DraftModelDrafter(None, Pair(tiny_decoder(VOCAB)), 4)
    options = SpeculativeOptions(
        40, sampling=SamplingParams(temperature=1), rule="coupled"
    )
    result = speculative_decode(target, [1, 2, 3], same, options)
    assert (result.accept_rate() or 0) > 0.95
    # A smaller draft vocabulary takes the first part of the target's own noise.
    sampler = DraftSampler(VOCAB)
    sampler.follow(options.sampling, 0, True, VOCAB + 2)
    token = sampler.begin([1, 2, 3]).draw(mx.zeros((VOCAB,)))
    padded = Sampler(0).gumbel_at([3], Purpose.TARGET, VOCAB + 2)[0, :VOCAB]
    assert token.item() == mx.argmax(padded).item()


def test_runs_that_share_a_drafter_keep_their_own_settings() -> None:
    target = tiny_decoder(VOCAB)
    drafter = DraftModelDrafter(None, Pair(tiny_decoder(VOCAB)), 4)
    first, second = (
        SpeculativeOptions(
            30, sampling=SamplingParams(temperature), seed=seed, rule="coupled"
        )
        for temperature, seed in ((1.0, 1), (0.0, 9))
    )
    stream = speculative_stream(target, target.new_cache(), [1, 2], drafter, first)
    speculative_stream(target, target.new_cache(), [3], drafter, second)
    result = SpeculativeDecodeResult()
    for event in stream:
        result.observe(event)
    assert (result.accept_rate() or 0) > 0.95
    plain = speculative_decode(target, [1, 2], None, first)
    assert result.generated_tokens == plain.generated_tokens


def test_a_draft_cut_short_leaves_the_draft_model_in_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = tiny_decoder(VOCAB)
    drafter = DraftModelDrafter(None, Pair(decoder), 4)
    drafter.propose([1, 2, 3, 4, 5], None, 4)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "forward_batch_with_hidden", interrupted)
        with pytest.raises(KeyboardInterrupt):
            drafter.propose([9, 8, 7, 6, 5], None, 4)
    found = drafter.propose([1, 2, 3, 4, 5], None, 4).tokens
    fresh = DraftModelDrafter(None, Pair(decoder), 4)
    assert found == fresh.propose([1, 2, 3, 4, 5], None, 4).tokens
