"""What does not fit is refused with the figures, and what would fit."""

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_spec import CapacityError, Decoder, SpeculativeOptions, speculative_decode
from mlx_spec.loading import load_decoder
from mlx_spec.memory import MemoryPlan, capacity_for
from tests.checkpoints import write_checkpoint
from tests.fakes import tiny_config, tiny_decoder


@pytest.mark.parametrize("rows", [1, 256, 257, 1_000, 5_000, 100_000])
def test_capacity_is_enough_and_not_much_more(rows: int) -> None:
    assert rows <= capacity_for(rows) <= max(256, 1.6 * rows + 256)
    assert capacity_for(capacity_for(rows)) == capacity_for(rows)


def test_plan_equals_what_caches_really_take() -> None:
    decoder = tiny_decoder()
    for length in (1, 256, 300, 1_000):
        cache = decoder.new_cache()
        decoder.prefill([1] * length, 0, cache)
        assert decoder.memory_plan.cache_bytes(length) == cache.nbytes


def test_plan_of_window_layers_is_an_upper_bound() -> None:
    config = tiny_config().replace(
        layer_types=("sliding_attention", "full_attention"), sliding_window=8
    )
    decoder = Decoder.random(config)
    cache = decoder.new_cache()
    decoder.prefill([1] * 700, 0, cache)
    assert 0 < cache.nbytes <= decoder.memory_plan.cache_bytes(700)


def limited(num_tokens: int) -> Decoder:
    """A decoder whose memory suffices for a cache of ``num_tokens``."""
    plan = tiny_decoder().memory_plan
    limit = plan.weight_bytes + plan.cache_bytes(num_tokens)
    return Decoder(tiny_config(), memory_limit=limit)


def test_growing_a_cache_past_the_limit_is_refused_before_it_happens() -> None:
    decoder = limited(256)
    cache = decoder.new_cache()
    decoder.prefill([1] * 256, 0, cache)
    held = cache.nbytes
    with pytest.raises(CapacityError, match=r"model .* \+ cache .*up to 256 tokens"):
        decoder.forward_token(1, 256, cache)
    assert cache.seq_len == 256
    assert cache.nbytes == held


def test_a_run_within_the_limit_goes_through() -> None:
    options = SpeculativeOptions(max_new_tokens=200)
    result = speculative_decode(limited(256), [1, 2, 3], None, options)
    assert result.tokens_generated == 200


def test_a_model_larger_than_the_limit_is_refused_before_it_is_loaded(
    tmp_path: Path,
) -> None:
    folder = write_checkpoint(tmp_path / "model", "qwen3_moe")
    active = mx.get_active_memory()
    with pytest.raises(CapacityError, match="smaller model"):
        load_decoder(folder, memory_limit=10_000)
    assert mx.get_active_memory() - active < 10_000


def test_no_limit_means_no_check() -> None:
    MemoryPlan(None, 10**15, (10**9,), (None,)).check(10**6)


def test_the_longest_context_that_fits_does_fit() -> None:
    plan = MemoryPlan(10**9, 10**8, (1_000, 1_000), (None, 128))
    longest = plan.max_tokens()
    plan.check(longest)
    with pytest.raises(CapacityError, match=f"{longest:,}"):
        plan.check(capacity_for(longest + 1))
