"""Our decoder gives mlx-lm's logits, for every family and its quantized forms."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec.loading import load_decoder
from tests.checkpoints import FAMILIES, hf_config, write_checkpoint, write_quantized

NUM_PREFILL, NUM_SINGLE, NUM_BLOCK = 23, 9, 8


def reference_logits(folder: Path, tokens: list[int]) -> mx.array:
    """Logits (T, V) of mlx-lm's class, the whole sequence in one forward."""
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    return model(mx.array(tokens)[None])[0]


def our_logits(folder: Path, tokens: list[int]) -> mx.array:
    """Logits (T, V) of our decoder, as prefill, single tokens and a block."""
    decoder = load_decoder(folder, dtype="float32")
    cache = decoder.new_cache()
    rows = [decoder.forward_batch(tokens[:NUM_PREFILL], 0, cache)]
    for position in range(NUM_PREFILL, NUM_PREFILL + NUM_SINGLE):
        rows.append(decoder.forward_token(tokens[position], position, cache)[None])
    block = tokens[NUM_PREFILL + NUM_SINGLE :]
    rows.append(decoder.forward_batch(block, cache.seq_len, cache))
    assert len(block) == NUM_BLOCK
    return mx.concatenate(rows)


def assert_parity(folder: Path, vocab_size: int) -> None:
    length = NUM_PREFILL + NUM_SINGLE + NUM_BLOCK
    tokens = [(7 * i * i + 3 * i + 1) % vocab_size for i in range(length)]
    expected, found = reference_logits(folder, tokens), our_logits(folder, tokens)
    assert found.shape == expected.shape
    assert mx.abs(expected).max() > 0.1, "the checkpoint must say something"
    assert mx.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_mlx_lms(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", family)
    assert_parity(folder, hf_config(family)["vocab_size"])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_logits_equal_mlx_lms(family: str, bits: int, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", family)
    folder = write_quantized(tmp_path / "model", source, bits)
    assert_parity(folder, hf_config(family)["vocab_size"])


@pytest.mark.parametrize("family", [f for f in FAMILIES if "moe" in f])
def test_one_active_expert_is_weighted_as_in_mlx_lm(
    family: str, tmp_path: Path
) -> None:
    config = hf_config(family)
    name = "moe_k" if family == "ernie4_5_moe" else "num_experts_per_tok"
    folder = write_checkpoint(tmp_path / "model", family, overrides={name: 1})
    assert_parity(folder, config["vocab_size"])


def test_null_fields_mean_their_defaults(tmp_path: Path) -> None:
    nulls = {"layer_types": None, "rope_theta": None}
    folder = write_checkpoint(tmp_path / "model", "gpt_oss", overrides=nulls)
    config = load_decoder(folder).config
    assert [config.window_of(layer) for layer in range(4)] == [8, None, 8, None]


def in_bfloat16(model: Any) -> None:
    """Cast a model of mlx-lm, all but what it wants to keep in float32."""
    from mlx.utils import tree_map_with_path

    keeps = getattr(model, "cast_predicate", lambda path: True)

    def cast(path: str, value: mx.array) -> mx.array:
        if mx.issubdtype(value.dtype, mx.floating) and keeps(path):
            return value.astype(mx.bfloat16)
        return value

    model.update(tree_map_with_path(cast, model.parameters()))


# On a CPU, mixtures in half precision run quantized only.
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logits_equal_mlx_lms(family: str, tmp_path: Path) -> None:
    from mlx_lm.utils import load_model

    source = write_checkpoint(tmp_path / "source", family)
    folder = write_quantized(tmp_path / "model", source, 8)
    model, _ = load_model(folder)
    in_bfloat16(model)
    tokens = [(7 * i * i + 3 * i + 1) % 97 for i in range(24)]
    expected = model(mx.array(tokens)[None])[0]
    decoder = load_decoder(folder, dtype="bfloat16")
    found = decoder.forward_batch(tokens, 0, decoder.new_cache())
    assert found.dtype == expected.dtype
    assert mx.abs(found - expected).max() < 0.05
