"""The sampling distribution, against mlx-lm's, and the keyed draws."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_spec import Sampler, SamplingParams, SpecError, sampling_distribution
from mlx_spec.sampling import Purpose, block_contexts, distribution_rows

VOCAB = 40
LOGITS = mx.random.normal((5, VOCAB), scale=3, key=mx.random.key(3))


def mlx_lm_distribution(
    logits: mx.array, params: SamplingParams, history: list[int]
) -> mx.array:
    """What mlx-lm's processors and filters leave, as probabilities."""
    from mlx_lm import sample_utils

    scores = mx.array(logits)[None]
    for processor in sample_utils.make_logits_processors(
        dict(params.logit_bias) or None,
        params.repetition_penalty if params.repetition_penalty != 1 else None,
        params.penalty_context,
        params.presence_penalty or None,
        params.penalty_context,
        params.frequency_penalty or None,
        params.penalty_context,
    ):
        scores = processor(mx.array(history), scores)
    scores = scores - mx.logsumexp(scores, keepdims=True)
    if params.top_p < 1:
        scores = sample_utils.apply_top_p(scores, params.top_p)
    if params.min_p > 0:
        scores = sample_utils.apply_min_p(scores, params.min_p)
    if params.top_k:
        scores = sample_utils.apply_top_k(scores, params.top_k)
    return mx.softmax(scores[0] * (1 / params.temperature))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 0.8, "min_p": 0.1},
        {"temperature": 0.7, "top_p": 0.8, "min_p": 0.05, "top_k": 3},
        {"temperature": 1.0, "repetition_penalty": 1.3},
        {"temperature": 1.0, "presence_penalty": 0.7},
        {"temperature": 1.0, "frequency_penalty": 0.4},
        {"temperature": 0.9, "logit_bias": {3: 5.0, 7: -100.0}},
        {
            "temperature": 0.9,
            "top_p": 0.9,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.3,
            "frequency_penalty": 0.2,
            "logit_bias": {0: 2.0},
            "penalty_context": 4,
        },
    ],
)
def test_distribution_equals_mlx_lms(settings: dict[str, object]) -> None:
    params = SamplingParams(**settings)  # type: ignore[arg-type]
    history = [1, 2, 3, 3, 2, 9, 3]
    for row in LOGITS:
        ours = sampling_distribution(row, params, history)
        theirs = mlx_lm_distribution(row, params, history)
        assert ours.dtype == mx.float32
        assert mx.allclose(ours, theirs, atol=1e-6)


def test_rows_with_their_own_histories_equal_single_rows() -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.5)
    histories = [[1], [1, 2], [3, 3, 3], [], list(range(VOCAB))]
    rows = sampling_distribution(LOGITS, params, histories)
    for row, logits, history in zip(rows, LOGITS, histories, strict=True):
        single = sampling_distribution(logits, params, history)
        assert mx.array_equal(row, single)


@pytest.mark.parametrize("temperature", [1e-5, 1e5])
def test_extreme_temperatures_give_a_distribution(temperature: float) -> None:
    logits = LOGITS * 10
    rows = sampling_distribution(logits, SamplingParams(temperature, top_p=0.9))
    assert mx.allclose(rows.sum(axis=-1), mx.ones(5), atol=1e-5)
    assert mx.array_equal(mx.argmax(rows, axis=-1), mx.argmax(logits, axis=-1))


def test_temperature_zero_is_the_argmax() -> None:
    rows = sampling_distribution(LOGITS, SamplingParams(temperature=0))
    assert mx.array_equal(mx.argmax(rows, axis=-1), mx.argmax(LOGITS, axis=-1))
    assert mx.array_equal(rows.sum(axis=-1), mx.ones(5))


def test_half_precision_logits_give_float32_probabilities() -> None:
    params = SamplingParams(temperature=1)
    exact = sampling_distribution(LOGITS.astype(mx.bfloat16).astype(mx.float32), params)
    found = sampling_distribution(LOGITS.astype(mx.bfloat16), params)
    assert found.dtype == mx.float32
    assert mx.array_equal(found, exact)


def test_a_top_k_beyond_the_vocabulary_keeps_all() -> None:
    plain = sampling_distribution(LOGITS, SamplingParams(temperature=1))
    large = sampling_distribution(LOGITS, SamplingParams(temperature=1, top_k=999))
    assert mx.array_equal(plain, large)


def test_block_contexts_give_each_row_its_own_history() -> None:
    params = SamplingParams(temperature=1, frequency_penalty=1.0, penalty_context=3)
    contexts = block_contexts([7], mx.array([8, 9], mx.int32), params)
    assert contexts is not None
    assert contexts.tolist() == [[-1, -1, 7], [-1, 7, 8], [7, 8, 9]]
    rows = distribution_rows(LOGITS[:3], params, contexts)
    expected = sampling_distribution(LOGITS[:3], params, [[7], [7, 8], [7, 8, 9]])
    assert mx.array_equal(rows, expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", 1e-39),
        ("temperature", float("inf")),
        ("repetition_penalty", 1e-46),
        ("repetition_penalty", 1e39),
        ("frequency_penalty", 1e39),
        ("logit_bias", {3: float("nan")}),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", float("inf")),
        ("frequency_penalty", float("nan")),
        ("penalty_context", 0),
        ("logit_bias", {-1: 1.0}),
    ],
)
def test_impossible_settings_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(SpecError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_draws_depend_on_seed_position_and_purpose_only() -> None:
    first, second = Sampler(5), Sampler(5)
    second.uniform()  # its own stream does not disturb the keyed draws
    for purpose in (Purpose.ACCEPT, Purpose.NEXT):
        for position in (0, 1, 2**40):
            assert first.uniform_at(position, purpose) == second.uniform_at(
                position, purpose
            )
    numbers = {
        Sampler(seed).uniform_at(position, purpose)
        for seed in range(5)
        for position in range(5)
        for purpose in Purpose
    }
    assert len(numbers) == 5 * 5 * len(Purpose)


def test_keyed_numbers_are_uniform_and_independent_of_each_other() -> None:
    values = np.array(
        [
            [
                Sampler(seed).uniform_at(position, Purpose.ACCEPT)
                for position in range(20)
            ]
            for seed in range(2_000)
        ]
    )
    assert values.min() >= 0
    assert values.max() < 1
    # 40,000 numbers: the mean's sigma is 0.0014, a tenth's share's 0.0015.
    assert abs(values.mean() - 0.5) < 0.008
    shares = np.histogram(values, bins=10, range=(0, 1))[0] / values.size
    assert np.abs(shares - 0.1).max() < 0.008
    neighbours = np.corrcoef(values[:, :-1].ravel(), values[:, 1:].ravel())[0, 1]
    assert abs(neighbours) < 0.03


def test_gumbel_noise_of_a_position_does_not_depend_on_the_block() -> None:
    sampler = Sampler(9)
    block = sampler.gumbel_at(range(3, 8), Purpose.TARGET, VOCAB)
    alone = sampler.gumbel_at([5], Purpose.TARGET, VOCAB)
    assert mx.array_equal(block[2], alone[0])


def test_sample_from_follows_the_weights_and_skips_zeros() -> None:
    weights = [0.0, 1.0, 0.0, 3.0, 0.0]
    sampler = Sampler(1)
    counts = np.bincount([sampler.sample_from(weights) for _ in range(20_000)])
    assert counts[[0, 2]].tolist() == [0, 0]
    assert abs(counts[3] / 20_000 - 0.75) < 0.02
