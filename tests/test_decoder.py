"""The decoder's own interface: taps, prefill, cache kinds, numerics."""

import mlx.core as mx
import pytest

from mlx_spec import CapacityError, Decoder, ModelConfig, SpecError
from mlx_spec.weights import RandomWeights
from tests.fakes import tiny_config, tiny_decoder
from tests.numerics import assert_same_values

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def test_forms_of_forward_agree() -> None:
    decoder = tiny_decoder()
    rows = decoder.forward_batch(TOKENS, 0, decoder.new_cache())
    assert rows.shape == (8, 50)
    cache = decoder.new_cache()
    for position, token in enumerate(TOKENS):
        row = decoder.forward_token(token, position, cache)
        assert row.shape == (50,)
        assert_same_values(row, rows[position])
    logits, hidden = decoder.forward_batch_with_hidden(TOKENS, 0, decoder.new_cache())
    assert mx.array_equal(logits, rows)
    assert hidden.shape == (8, 16)
    ids = mx.array(TOKENS, mx.int32)
    assert mx.array_equal(decoder.forward_batch(ids, 0, decoder.new_cache()), rows)


def test_prefill_gives_the_last_row_whatever_the_chunks() -> None:
    decoder = tiny_decoder()
    expected, hidden = decoder.forward_batch_with_hidden(TOKENS, 0, decoder.new_cache())
    for step in (1, 3, 8, 100):
        cache = decoder.new_cache()
        row, last = decoder.prefill(TOKENS, 0, cache, step)
        assert_same_values(row, expected[-1])
        assert_same_values(last, hidden[-1])
        assert cache.seq_len == len(TOKENS)


def test_last_only_computes_one_row_of_logits() -> None:
    decoder = tiny_decoder()
    result = decoder.forward(TOKENS, 0, decoder.new_cache(), last_only=True)
    assert result.logits.shape == (1, 50)
    assert result.hidden.shape == (8, 16)


def test_taps_are_the_outputs_of_the_layers_asked_for() -> None:
    decoder = tiny_decoder()
    plain = decoder.forward(TOKENS, 0, decoder.new_cache())
    assert plain.taps == ()
    tapped = decoder.forward(TOKENS, 0, decoder.new_cache(), taps=(1, 0))
    assert mx.array_equal(tapped.logits, plain.logits)
    _, _, both = decoder.forward_batch_with_hidden(
        TOKENS, 0, decoder.new_cache(), taps=(1, 0)
    )
    last, first = tapped.taps
    assert mx.array_equal(both[0], last)
    with pytest.raises(SpecError, match=r"no layers \[2\] to tap"):
        decoder.forward(TOKENS, 0, decoder.new_cache(), taps=(0, 2))
    assert first.shape == last.shape == (8, 16)
    # The last layer's output, normalised, is the final hidden state (weights are 1).
    normed = mx.fast.rms_norm(last, mx.ones(16), decoder.config.rms_norm_eps)
    assert_same_values(normed, plain.hidden)
    shallow = Decoder(decoder.config.replace(num_hidden_layers=1), RandomWeights(1))
    one = shallow.forward(TOKENS, 0, shallow.new_cache(), taps=(0,))
    assert_same_values(first, one.taps[0])


def test_random_decoders_depend_on_the_seed_only() -> None:
    rows = [
        tiny_decoder(seed=seed).forward_batch(TOKENS, 0, tiny_decoder().new_cache())
        for seed in (1, 1, 2)
    ]
    assert mx.array_equal(rows[0], rows[1])
    assert not mx.allclose(rows[0], rows[2])
    default = Decoder(tiny_config())
    assert default.fingerprint == tiny_decoder(seed=0).fingerprint
    assert tiny_decoder(seed=1).fingerprint != tiny_decoder(seed=2).fingerprint


def test_no_tokens_and_too_many_are_refused() -> None:
    decoder = Decoder(tiny_config().replace(max_position_embeddings=4))
    with pytest.raises(SpecError, match="no tokens"):
        decoder.forward_batch([], 0, decoder.new_cache())
    cache = decoder.new_cache()
    with pytest.raises(CapacityError, match=r"8 tokens .* context of 4"):
        decoder.forward_batch(TOKENS, 0, cache)
    assert cache.seq_len == 0


def test_a_failed_forward_leaves_no_trace_in_the_cache() -> None:
    decoder = Decoder(tiny_config().replace(max_position_embeddings=10))
    cache = decoder.new_cache()
    decoder.forward_batch(TOKENS, 0, cache)
    with pytest.raises(CapacityError):
        decoder.forward_batch(TOKENS, 8, cache)
    assert cache.seq_len == 8
    row = decoder.forward_token(7, 8, cache)
    fresh = decoder.forward_batch([*TOKENS, 7], 0, decoder.new_cache())
    assert_same_values(row, fresh[-1])


def config_with_heads(**changes: object) -> ModelConfig:
    return tiny_config().replace(hidden_size=32, head_dim=32, **changes)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("bits", "tolerance"), [(8, 0.05), (4, 0.7)])
def test_quantized_caches_give_nearly_the_same_logits(
    bits: int, tolerance: float, has_sinks: bool
) -> None:
    config = config_with_heads(attention_sinks=has_sinks)
    plain = Decoder(config, RandomWeights(3))
    packed = Decoder(config, RandomWeights(3), kv_bits=bits)
    expected = plain.forward_batch(TOKENS * 4, 0, plain.new_cache())
    found = packed.forward_batch(TOKENS * 4, 0, packed.new_cache())
    error = mx.abs(found - expected).max().item()
    assert 0 < error < tolerance


def test_quantized_sinks_are_not_forgotten() -> None:
    with_sinks = Decoder(
        config_with_heads(attention_sinks=True), RandomWeights(3), kv_bits=8
    )
    without = Decoder(config_with_heads(), RandomWeights(3), kv_bits=8)
    rows = [
        model.forward_batch(TOKENS, 0, model.new_cache())
        for model in (with_sinks, without)
    ]
    assert mx.abs(rows[0] - rows[1]).max() > 0.05


def test_a_cache_that_cannot_be_quantized_is_refused_at_once() -> None:
    with pytest.raises(SpecError, match="head_dim 4 cannot be quantized"):
        Decoder(tiny_config(), kv_bits=8)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "mscale": 0.7,
            "mscale_all_dim": 0.3,
        },
        {
            "rope_type": "longrope",
            "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 8,
            "long_factor": [1.0 + i / 4 for i in range(8)],
        },
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "dynamic", "factor": 2.0},
    ],
)
def test_rope_scalings_equal_mlx_lms(scaling: dict[str, object]) -> None:
    from mlx_lm.models.rope_utils import initialize_rope

    from mlx_spec.rope import Rope

    x = mx.random.normal((1, 2, 20, 16), key=mx.random.key(1))
    ours = Rope(16, 10_000.0, False, scaling, 256)
    theirs = initialize_rope(16, 10_000.0, False, dict(scaling), 256)
    assert mx.allclose(ours(x, 30), theirs(x, 30), atol=1e-5)


def test_an_unknown_rope_scaling_is_refused() -> None:
    with pytest.raises(SpecError, match="RoPE scaling 'ntk9'"):
        Decoder(tiny_config().replace(rope_scaling={"rope_type": "ntk9"}))
