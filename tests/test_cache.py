"""Caches: lengths, roll-back, forks, files; bit for bit, by hypothesis."""

from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_spec import (
    Decoder,
    KVCache,
    LoadError,
    ModelCache,
    ModelConfig,
    SpecError,
    SpeculativeOptions,
    speculative_decode,
    speculative_stream,
)
from mlx_spec.cache import (
    MAX_ROLLBACK,
    QuantizedKVCache,
    SlidingKVCache,
    common_length,
)
from mlx_spec.memory import capacity_for
from mlx_spec.weights import RandomWeights
from tests.fakes import OracleDrafter
from tests.numerics import assert_same_values

VOCAB, WINDOW = 50, 8


def config(kind: str) -> ModelConfig:
    base = ModelConfig.preset("glm-5.2").replace(
        vocab_size=VOCAB,
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
    )
    if kind != "sliding":
        return base
    layers = ("sliding_attention", "full_attention")
    return base.replace(layer_types=layers, sliding_window=WINDOW, attention_sinks=True)


def decoder(kind: str) -> Decoder:
    kv_bits = {"8 bit": 8, "4 bit": 4}.get(kind)
    return Decoder(config(kind), RandomWeights(1), kv_bits=kv_bits)


KINDS = ["full", "sliding", "8 bit", "4 bit"]
DECODERS = {kind: decoder(kind) for kind in KINDS}


def assert_same_content(found: ModelCache, expected: ModelCache) -> None:
    """Compare the rows that later tokens can read."""
    assert found.seq_len == expected.seq_len
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        rows = ours.seq_len
        if isinstance(ours, SlidingKVCache):
            rows = min(rows, WINDOW - 1)
        for a, b in zip(ours.state(), theirs.state(), strict=True):
            count = a.shape[-2]
            assert count >= rows
            assert b.shape[-2] >= rows
            assert_same_values(
                a[..., count - rows :, :], b[..., b.shape[-2] - rows :, :]
            )


def fresh(model: Decoder, tokens: list[int]) -> ModelCache:
    cache = model.new_cache()
    if tokens:
        model.forward_batch(tokens, 0, cache)
    return cache


@pytest.mark.parametrize("kind", KINDS)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    lengths=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    wrong=st.frozensets(st.integers(0, 70), max_size=20),
    stop_after=st.integers(1, 30),
)
def test_stopping_at_any_token_equals_a_fresh_prefill(
    kind: str,
    prompt: list[int],
    lengths: list[int],
    wrong: frozenset[int],
    stop_after: int,
) -> None:
    model = DECODERS[kind]
    options = SpeculativeOptions(max_new_tokens=30)
    plain = speculative_decode(model, prompt, None, options).generated_tokens
    drafter = OracleDrafter([*prompt, *plain], lengths, wrong, VOCAB)
    cache, emitted = model.new_cache(), list[int]()
    for event in speculative_stream(model, cache, prompt, drafter, options):
        emitted += event.tokens
        if len(emitted) >= stop_after:
            break
    assert emitted == plain[: len(emitted)]
    assert_same_content(cache, fresh(model, [*prompt, *emitted][:-1]))


@pytest.mark.parametrize("kind", KINDS)
@given(
    tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
    drafted=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=MAX_ROLLBACK),
    kept=st.integers(0, MAX_ROLLBACK),
    following=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
)
def test_rolling_back_and_feeding_again_equals_never_having_drafted(
    kind: str,
    tokens: list[int],
    drafted: list[int],
    kept: int,
    following: list[int],
) -> None:
    model = DECODERS[kind]
    kept = min(kept, len(drafted))
    cache = fresh(model, tokens)
    model.forward_batch(drafted, len(tokens), cache)
    cache.truncate(len(tokens) + kept)
    rows = model.forward_batch(following, cache.seq_len, cache)
    never = fresh(model, tokens + drafted[:kept])
    expected = model.forward_batch(following, never.seq_len, never)
    assert_same_values(rows, expected)
    assert_same_content(cache, never)


@given(
    steps=st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, MAX_ROLLBACK)),
        min_size=1,
        max_size=12,
    )
)
def test_sliding_cache_returns_the_rows_a_full_cache_would(
    steps: list[tuple[int, int]],
) -> None:
    sliding, full = SlidingKVCache(WINDOW), KVCache()
    value = 0
    for rows, back in steps:
        part = mx.arange(value, value + rows, dtype=mx.float32).reshape(1, 1, rows, 1)
        value += rows
        window = sliding.append(part, -part)
        everything = full.append(part, -part)
        wanted = min(WINDOW - 1 + rows, full.seq_len)
        for ours, theirs in zip(window, everything, strict=True):
            assert isinstance(ours, mx.array)
            assert isinstance(theirs, mx.array)
            assert mx.array_equal(ours, theirs[..., full.seq_len - wanted :, :])
        length = full.seq_len - min(back, rows)  # a round takes back what it added
        sliding.truncate(length)
        full.truncate(length)
        assert sliding.seq_len == full.seq_len == length


def test_sliding_cache_memory_is_bounded() -> None:
    cache = SlidingKVCache(WINDOW)
    one = mx.zeros((1, 1, 1, 4))
    sizes = set()
    for _ in range(500):
        cache.append(one, one)
        sizes.add(cache.nbytes)
    bound = 2 * (WINDOW + 15) * 4 * 4 * 2
    assert max(sizes) <= bound
    long = mx.zeros((1, 1, 700, 4))
    cache.append(long, long)
    assert cache.nbytes <= bound


def test_sliding_cache_refuses_to_go_back_further_than_it_remembers() -> None:
    cache = SlidingKVCache(WINDOW)
    for _ in range(100):
        cache.append(mx.zeros((1, 1, 1, 4)), mx.zeros((1, 1, 1, 4)))
    with pytest.raises(SpecError, match="can be set back to"):
        cache.truncate(20)
    cache.truncate(0)
    assert cache.seq_len == 0


@pytest.mark.parametrize("bad", [-1, 4])
def test_truncate_refuses_lengths_it_does_not_have(bad: int) -> None:
    cache = KVCache()
    cache.append(mx.zeros((1, 1, 3, 4)), mx.zeros((1, 1, 3, 4)))
    with pytest.raises(SpecError, match=f"3 tokens back to {bad}"):
        cache.truncate(bad)


def test_appending_copies_a_number_of_rows_linear_in_the_length() -> None:
    copied, capacity = 0, 0
    for length in range(1, 32_769):
        if length > capacity:
            copied += length - 1
            capacity = capacity_for(length)
    assert copied < 4 * 32_768
    assert capacity < 1.6 * 32_768


def test_truncate_does_not_copy() -> None:
    cache = fresh(DECODERS["full"], list(range(40)))
    before = [id(b) for layer in cache.layers for b in layer._buffers]
    cache.truncate(3)
    assert [id(b) for layer in cache.layers for b in layer._buffers] == before


@pytest.mark.parametrize("kind", KINDS)
def test_fork_is_independent_of_its_origin(kind: str) -> None:
    model = DECODERS[kind]
    origin = fresh(model, list(range(20)))
    fork = origin.fork()
    model.forward_batch([1, 2, 3], 20, origin)
    model.forward_batch([7, 8], 20, fork)
    assert (origin.seq_len, fork.seq_len) == (23, 22)
    assert_same_content(origin, fresh(model, [*range(20), 1, 2, 3]))
    assert_same_content(fork, fresh(model, [*range(20), 7, 8]))


def test_fork_shares_buffers_until_one_side_writes() -> None:
    model = DECODERS["full"]
    origin = fresh(model, list(range(40)))
    mx.eval([layer.state() for layer in origin.layers])
    before = mx.get_active_memory()
    fork = origin.fork()
    mx.eval([layer.state() for layer in fork.layers])
    assert mx.get_active_memory() - before < origin.nbytes / 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0, 5, 37])
def test_saved_cache_continues_as_the_original(
    kind: str, length: int, tmp_path: Path
) -> None:
    model = DECODERS[kind]
    cache = fresh(model, list(range(length)))
    cache.save(tmp_path / "cache.safetensors")
    loaded = model.new_cache()
    loaded.load(tmp_path / "cache.safetensors")
    assert loaded.seq_len == length
    rows = model.forward_batch([3, 4], length, loaded)
    assert mx.array_equal(rows, model.forward_batch([3, 4], length, cache))
    assert [file.name for file in tmp_path.iterdir()] == ["cache.safetensors"]


def test_cache_of_another_model_is_refused(tmp_path: Path) -> None:
    fresh(DECODERS["full"], [1, 2]).save(tmp_path / "cache.safetensors")
    other = Decoder.random(config("full"), seed=2).new_cache()
    with pytest.raises(LoadError, match="fingerprint"):
        other.load(tmp_path / "cache.safetensors")


def test_damaged_cache_file_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    model = DECODERS["full"]
    file = tmp_path / "cache.safetensors"
    fresh(model, list(range(9))).save(file)
    file.write_bytes(file.read_bytes()[:-40])
    cache = fresh(model, [1, 2, 3])
    with pytest.raises(LoadError, match="cut short"):
        cache.load(file)
    assert_same_content(cache, fresh(model, [1, 2, 3]))


def test_layers_that_disagree_are_reported() -> None:
    cache = fresh(DECODERS["full"], [1, 2, 3])
    cache.layers[0].truncate(1)
    with pytest.raises(SpecError, match=r"hold \[1, 3\] tokens"):
        assert cache.seq_len


def test_reveal_undoes_truncate_until_rows_are_replaced() -> None:
    model = DECODERS["full"]
    cache = fresh(model, [1, 2, 3, 4])
    cache.truncate(2)
    cache.reveal(4)
    assert_same_content(cache, fresh(model, [1, 2, 3, 4]))
    cache.truncate(2)
    model.forward_batch([9], 2, cache)
    with pytest.raises(SpecError, match="not in the cache any more"):
        cache.reveal(4)


def test_quantized_cache_is_smaller() -> None:
    one = mx.random.normal((1, 2, 10, 64))
    sizes = []
    for cache in (KVCache(), QuantizedKVCache(8), QuantizedKVCache(4)):
        cache.append(one, one)
        sizes.append(cache.nbytes)
    assert sizes[0] > 3 * sizes[1] > 4 * sizes[2]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 9, 3], 1), ([4], [5], 0)],
)
def test_common_length(a: list[int], b: list[int], expected: int) -> None:
    assert common_length(a, b) == expected


def test_a_cache_of_other_bits_is_refused(tmp_path: Path) -> None:
    fresh(DECODERS["8 bit"], [1, 2]).save(tmp_path / "cache.safetensors")
    with pytest.raises(LoadError, match="fingerprint"):
        DECODERS["4 bit"].new_cache().load(tmp_path / "cache.safetensors")


def test_a_cache_of_another_type_is_refused(tmp_path: Path) -> None:
    halves = Decoder(config("full"), RandomWeights(1, mx.bfloat16))
    fresh(DECODERS["full"], []).save(tmp_path / "cache.safetensors")
    with pytest.raises(LoadError, match="fingerprint"):
        halves.new_cache().load(tmp_path / "cache.safetensors")
