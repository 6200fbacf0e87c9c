"""Packagings of published drafters, what is refused, and packing on load."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_spec import Decoder, DraftBlock, LoadError, ModelConfig, SamplingParams
from mlx_spec.draft import Drafter, FeatureDrafter, SamplingDrafter
from mlx_spec.drafters.published import kind_of, load_head_drafter, load_mtp_drafter
from mlx_spec.errors import SpecError
from mlx_spec.target import Features
from mlx_spec.tensor_file import write_tensors
from tests import heads
from tests.heads import KINDS, PUBLISHED, TAPS, TARGET, Published, Tensors, V, build

HISTORY = [5, 9, 2, 30, 11, 4, 4, 17]
FIELDS = ("mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head")


@pytest.fixture(scope="module")
def target() -> Decoder:
    return Decoder.random(ModelConfig.from_hf(TARGET), 3)


def drafted(drafter: Drafter, target: Decoder, temperature: float = 0.8) -> DraftBlock:
    assert isinstance(drafter, FeatureDrafter)
    assert isinstance(drafter, SamplingDrafter)
    drafter.follow(SamplingParams(temperature), 1, False, V)
    rows = target.forward(HISTORY[:-1], 0, target.new_cache(), taps=drafter.taps)
    drafter.observe(HISTORY, Features(0, rows.hidden, rows.taps))
    return drafter.propose(HISTORY, None, 5)


def rows_of(block: DraftBlock) -> np.ndarray[Any, Any]:
    return np.array(block.q_rows(V))


def specforge(extra: str = "") -> Published:
    config, tensors = heads.dspark("gated", extra)
    special = {name: config.pop(name) for name in FIELDS}
    special |= {"target_layer_ids": config.pop("target_layer_ids")}
    special |= {"projector_type": "dspark"}
    named = {"architectures": ["DFlashDraftModel"], "dflash_config": special}
    return config | named, tensors


def speculators(extra: str = "") -> Published:
    config, tensors = heads.dspark("gated", extra)
    layer = {name: config.pop(name) for name in heads.SHARED}
    layer |= {"num_hidden_layers": 2, "model_type": "qwen3"}
    del config["architectures"], config["model_type"], config["target_layer_ids"]
    tensors = {f"model.{name}": value for name, value in tensors.items()}
    tensors["verifier_norm.weight"] = mx.zeros((heads.H,))
    return config | {
        "speculators_model_type": "dspark",
        "transformer_layer_config": layer,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
    }, tensors


def old_names(extra: str = "") -> Published:
    config, tensors = heads.dspark("gated", extra)
    renamed = {k.replace("markov_head.", "logit_head."): v for k, v in tensors.items()}
    return config, renamed


@pytest.mark.parametrize("packaging", [specforge, speculators, old_names])
@pytest.mark.parametrize("extra", ["", "reduced", "anchorless"])
def test_dspark_drafts_the_same_in_every_packaging(
    packaging: Any, extra: str, target: Decoder
) -> None:
    plain = heads.dspark("gated", extra)
    published = packaging(extra)
    assert kind_of(plain[0]) == kind_of(published[0]) == "dspark"
    expected = drafted(build("dspark", plain, target), target)
    block = drafted(build("dspark", published, target), target)
    assert block.tokens == expected.tokens
    assert np.array_equal(rows_of(block), rows_of(expected))


@pytest.mark.parametrize(("count", "expected"), [(6, 6), (5, 5), (3, 6)])
def test_the_stated_number_of_tokens_tells_the_row_of_the_first(
    count: int, expected: int, target: Decoder
) -> None:
    config, tensors = speculators()
    config["speculators_config"] = {"proposal_methods": [{"speculative_tokens": count}]}
    drafter = build("dspark", (config, tensors), target, 20)
    assert isinstance(drafter, FeatureDrafter)
    rows = target.forward(HISTORY[:-1], 0, target.new_cache(), taps=drafter.taps)
    drafter.observe(HISTORY, Features(0, rows.hidden, rows.taps))
    assert len(drafter.propose(HISTORY, None, 20)) == expected


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dflash2"])
def test_a_prefix_of_the_names_is_no_matter(kind: str, target: Decoder) -> None:
    config, tensors = PUBLISHED[kind]()
    prefixed = {f"model.{name}": value for name, value in tensors.items()}
    expected = drafted(build(kind, (config, tensors), target), target)
    block = drafted(build(kind, (config, prefixed), target), target)
    assert np.array_equal(rows_of(block), rows_of(expected))


def test_a_window_of_all_layers_may_be_stated_apart(target: Decoder) -> None:
    config, tensors = heads.dflash()
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}
    special = config["dflash_config"] | {"use_swa": True, "swa_window_size": 4}
    apart = config | {"dflash_config": special}
    expected = drafted(build("dflash", (config | sliding, tensors), target), target)
    block = drafted(build("dflash", (apart, tensors), target), target)
    assert np.array_equal(rows_of(block), rows_of(expected))


@pytest.mark.parametrize(
    ("kind", "change", "expected"),
    [
        ("dspark", {"hidden_size": 64}, "hidden_size 64, the target 32"),
        ("dspark", {"vocab_size": 60}, "vocab_size 60, the target 50"),
        ("dspark", {"num_target_layers": 7}, "num_target_layers 7, the target 5"),
        ("dspark", {"target_hidden_size": 64}, "target_hidden_size 64, the target 32"),
        ("dspark", {"target_layer_ids": [-1, 2, 3]}, r"layers \[-1\]"),
        ("dspark", {"markov_rank": None}, "no 'markov_rank'"),
        ("dspark", {"markov_head_type": "fir"}, "'fir' is not supported"),
        ("dspark", {"mask_token_id": 50}, "mask_token_id 50, the target has tokens"),
        ("dspark", {"draft_vocab_size": 20}, r"20 tokens and no map \(d2t\)"),
        ("dflash2", {"dflash_config": {}}, "no 'conv_kernel_size'"),
        ("eagle3", {"norm_before_fc": True}, "no tensor 'input_norm.weight'"),
        ("eagle3", {"fc_norm": True}, r"no tensor 'fc_norm\.0\.weight'"),
    ],
)
def test_what_does_not_fit_is_refused(
    kind: str, change: Mapping[str, object], expected: str, target: Decoder
) -> None:
    config, tensors = PUBLISHED[kind]()
    with pytest.raises(LoadError, match=expected):
        build(kind, (config | change, tensors), target)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_needed_and_known(kind: str, target: Decoder) -> None:
    config, tensors = PUBLISHED[kind]()
    optional = ("t2d", "confidence_head", "embed_tokens", "shared_head.head")
    for name in tensors:
        rest = {k: v for k, v in tensors.items() if k != name}
        if any(part in name for part in optional):
            build(kind, (config, rest), target)
        else:
            with pytest.raises(LoadError):
                build(kind, (config, rest), target)
    prefix = "model.layers.5" if kind == "mtp" else "layers.0"
    more = {f"{prefix}.extra.weight": mx.zeros((2,)), f"{prefix}.other": mx.zeros(1)}
    with pytest.raises(LoadError, match=rf"{prefix}\.extra\.weight.*{prefix}\.other"):
        build(kind, (config, tensors | more), target)


def test_a_map_to_tokens_the_target_has_not_is_refused(target: Decoder) -> None:
    config, tensors = heads.dspark("vanilla", "reduced")
    tensors["d2t"] = tensors["d2t"] + 40
    with pytest.raises(LoadError, match="d2t names the tokens 43 to 81"):
        build("dspark", (config, tensors), target)


KEPT = ("norm", "conv.", "selector", "markov", ".gate.", "d2t", "t2d")


def rounded(tensors: Tensors, bits: int) -> Tensors:
    """What packed matrices stand for; those that are to stay are left as they are."""
    result: Tensors = {}
    for name, value in tensors.items():
        if any(part in name for part in KEPT) or value.ndim < 2 or value.shape[-1] % 32:
            result[name] = value
        else:
            group = 64 if value.shape[-1] % 64 == 0 else 32
            packed = mx.quantize(value, group_size=group, bits=bits)
            result[name] = mx.dequantize(*packed, group_size=group, bits=bits)
    return result


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_drafters_draft_with_rounded_matrices(
    kind: str, bits: int, target: Decoder
) -> None:
    config, tensors = PUBLISHED[kind]()
    plain = build(kind, (config, rounded(tensors, bits)), target)
    packed = build(kind, (config, tensors), target, quantize=bits)
    assert packed.memory_plan.weight_bytes < 0.8 * plain.memory_plan.weight_bytes  # type: ignore[attr-defined]
    expected, block = drafted(plain, target), drafted(packed, target)
    assert block.tokens == expected.tokens
    assert np.abs(rows_of(block) - rows_of(expected)).max() < 1e-4
    assert not np.array_equal(
        rows_of(block), rows_of(drafted(build(kind, (config, tensors), target), target))
    )


def test_other_numbers_of_bits_are_refused(target: Decoder) -> None:
    with pytest.raises(SpecError, match="quantize is 5"):
        build("dflash", heads.dflash(), target, quantize=5)


@pytest.mark.parametrize("kind", KINDS)
def test_drafters_are_loaded_and_packed_from_folders(
    kind: str, target: Decoder, tmp_path: Path
) -> None:
    config, tensors = PUBLISHED[kind]()
    write_tensors(tmp_path / "model.safetensors", tensors, {})
    expected = build(kind, (config, tensors), target, quantize=8)
    options = {"length": 5, "quantize": 8}
    if kind == "mtp":
        drafter: Drafter = load_mtp_drafter(config, tmp_path, target, **options)  # type: ignore[arg-type]
    else:
        found = kind_of(config)
        assert found != "model"
        drafter = load_head_drafter(found, config, tmp_path, target, **options)  # type: ignore[arg-type]
    block = drafted(drafter, target)
    assert np.array_equal(rows_of(block), rows_of(drafted(expected, target)))
