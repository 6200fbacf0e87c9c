"""Drafters with random weights in the published layouts, for a tiny target."""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import mlx.core as mx

from mlx_spec import Decoder
from mlx_spec.draft import Drafter
from mlx_spec.drafters.block import BlockDrafter
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.dflash import DFlashNetwork
from mlx_spec.drafters.dspark import DSparkNetwork
from mlx_spec.drafters.eagle3 import Eagle3Head
from mlx_spec.drafters.mtp import MTPHead

Tensors = dict[str, mx.array]
Published = tuple[dict[str, Any], Tensors]

TARGET: dict[str, Any] = {
    "model_type": "glm4_moe",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 5,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "attention_bias": False,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 1,
}
H, V, HEADS, KV, D, WIDTH, DRAFT_VOCAB = 32, 50, 4, 2, 8, 48, 20
TAPS = [1, 2, 3]
SHARED = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": D,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
}


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Tensors:
    """Weights of the given shapes; norms are near one, as trained ones are."""
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    tensors: Tensors = {}
    for key, (name, shape) in zip(keys, sorted(shapes.items()), strict=True):
        noise = mx.random.normal(shape, key=key)
        is_norm = "norm" in name.rpartition(".")[0] and len(shape) == 1
        tensors[name] = 1 + 0.1 * noise if is_norm else noise * shape[-1] ** -0.5
    return tensors


def _attention(prefix: str, inputs: int, has_norm: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.q_proj.weight": (HEADS * D, inputs),
        f"{prefix}.k_proj.weight": (KV * D, inputs),
        f"{prefix}.v_proj.weight": (KV * D, inputs),
        f"{prefix}.o_proj.weight": (H, HEADS * D),
    }
    if has_norm:
        shapes |= {f"{prefix}.{part}_norm.weight": (D,) for part in "qk"}
    return shapes


def _mlp(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, H),
        f"{prefix}.up_proj.weight": (width, H),
        f"{prefix}.down_proj.weight": (H, width),
    }


def mtp() -> Published:
    """The target's config and its extra layer, one matrix an expert."""
    prefix = f"model.layers.{TARGET['num_hidden_layers']}"
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.eh_proj.weight": (H, 2 * H),
        f"{prefix}.mlp.gate.weight": (4, H),
        f"{prefix}.mlp.gate.e_score_correction_bias": (4,),
        f"{prefix}.embed_tokens.weight": (V, H),
        f"{prefix}.shared_head.head.weight": (V, H),
    }
    for name in (
        "enorm",
        "hnorm",
        "shared_head.norm",
        "input_layernorm",
        "post_attention_layernorm",
    ):
        shapes[f"{prefix}.{name}.weight"] = (H,)
    shapes |= _attention(f"{prefix}.self_attn", H, True)
    shapes |= _mlp(f"{prefix}.mlp.shared_experts", 16)
    for expert in range(4):
        shapes |= _mlp(f"{prefix}.mlp.experts.{expert}", 16)
    return TARGET, random_tensors(shapes, 1)


def eagle3(layer: str = "midlayer", extra: str = "") -> Published:
    """An EAGLE-3 head with a reduced vocabulary, in the original packaging.

    ``extra`` names what some packagings add: "input_norm", "fc_norm", "norm_output",
    "norm_before_residual" or "embed_tokens".
    """
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, 3 * H),
        "norm.weight": (H,),
        "lm_head.weight": (DRAFT_VOCAB, H),
        f"{layer}.hidden_norm.weight": (H,),
        f"{layer}.input_layernorm.weight": (H,),
        f"{layer}.post_attention_layernorm.weight": (H,),
    }
    shapes |= _attention(f"{layer}.self_attn", 2 * H, False)
    shapes |= _mlp(f"{layer}.mlp", WIDTH)
    config = SHARED | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": TAPS},
    }
    match extra:
        case "input_norm":
            shapes["input_norm.weight"] = (3 * H,)
            config["norm_before_fc"] = True
        case "fc_norm":
            shapes |= {f"fc_norm.{index}.weight": (H,) for index in range(3)}
        case "embed_tokens":
            shapes["embed_tokens.weight"] = (V, H)
        case "norm_output" | "norm_before_residual":
            config[extra] = True
    return config, random_tensors(shapes, 2) | _draft_vocabulary()


def _draft_vocabulary() -> Tensors:
    ids = mx.arange(DRAFT_VOCAB) * 2 + 3
    return {
        "d2t": (ids - mx.arange(DRAFT_VOCAB)).astype(mx.int64),
        "t2d": mx.zeros((V,), mx.bool_),
    }


def _block_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, 3 * H),
        "hidden_norm.weight": (H,),
        "norm.weight": (H,),
    }
    for index in range(2):
        layer = f"layers.{index}"
        shapes[f"{layer}.input_layernorm.weight"] = (H,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (H,)
        shapes |= _attention(f"{layer}.self_attn", H, True)
        shapes |= _mlp(f"{layer}.mlp", WIDTH)
    return shapes


def dflash(version: int = 1, extra: str = "") -> Published:
    """A DFlash head of two layers; the second version has all that it adds.

    ``extra`` names what some checkpoints add: "mask_embedding", "sinks", "sliding"
    (the first layer), "causal" (all layers) or "interleaved" (RoPE).
    """
    shapes = _block_shapes()
    special: dict[str, Any] = {"target_layer_ids": TAPS, "mask_token_id": 4}
    if version == 2:
        for index, part in product(range(2), ("attention_conv", "mlp_conv")):
            name = f"layers.{index}.{part}"
            shapes[f"{name}.base_kernel"] = (2, 2, H)
            shapes[f"{name}.kernel_projection.weight"] = (4 * H // 8, H)
        special |= {"conv_kernel_size": 2, "conv_group_size": 8}
        special |= {"selector_rank": 6, "selector_top_k": 5}
        shapes["candidate_selector.predecessor_codebook"] = (V, 6)
        shapes["candidate_selector.successor_codebook"] = (V, 6)
        shapes["candidate_selector.hidden_projection.weight"] = (6, H)
    config = SHARED | {
        "architectures": ["DFlashDraftModel" if version == 1 else "DFlash2DraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "block_size": 6,
        "num_target_layers": TARGET["num_hidden_layers"],
        "dflash_config": special,
    }
    match extra:
        case "mask_embedding":
            shapes["mask_embedding"] = (H,)
        case "sinks":
            for index in range(2):
                shapes[f"layers.{index}.self_attn.attention_sink_bias"] = (HEADS,)
        case "sliding" | "sliding-both-ways":
            config |= {"sliding_window": 8}
            config["layer_types"] = ["sliding_attention", "full_attention"]
            if extra != "sliding":
                config["is_causal"] = False
        case "causal":
            special["causal"] = True
        case "interleaved":
            config["rope_is_neox_style"] = False
    return config, random_tensors(shapes, 2 + version)


def dspark(markov: str = "vanilla", extra: str = "") -> Published:
    """A DSpark head of two layers in the DeepSpec packaging.

    ``extra``: "own" for an embedding and a head of its own, "reduced" for a head over
    fewer tokens, "capped" for capped logits, "anchorless" to draft from row 1 on.
    """
    rank = 6
    shapes = _block_shapes() | {
        "markov_head.markov_w1.weight": (V, rank),
        "markov_head.markov_w2.weight": (V, rank),
        "confidence_head.proj.weight": (1, H + rank),
        "confidence_head.proj.bias": (1,),
    }
    if markov == "gated":
        shapes["markov_head.gate_proj.weight"] = (rank, H + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if markov == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + H)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    config = SHARED | {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "block_size": 6,
        "num_target_layers": TARGET["num_hidden_layers"],
        "target_layer_ids": TAPS,
        "mask_token_id": 4,
        "markov_rank": rank,
        "markov_head_type": markov,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    more: Tensors = {}
    match extra:
        case "own":
            shapes |= {"embed_tokens.weight": (V, H), "lm_head.weight": (V, H)}
        case "reduced":
            shapes["lm_head.weight"] = (DRAFT_VOCAB, H)
            shapes["markov_head.markov_w2.weight"] = (DRAFT_VOCAB, rank)
            config["draft_vocab_size"] = DRAFT_VOCAB
            more = _draft_vocabulary()
        case "capped":
            config["final_logit_softcapping"] = 1.5
        case "anchorless":
            config["sample_from_anchor"] = False
    return config, random_tensors(shapes, 7) | more


def build(
    kind: str,
    published: Published,
    target: Decoder,
    length: int = 5,
    quantize: int | None = None,
) -> Drafter:
    """A drafter of one of the kinds below, from a config and tensors."""
    config, tensors = published
    if kind in ("mtp", "eagle3"):
        made = MTPHead if kind == "mtp" else Eagle3Head
        head = made(config, tensors, "a test", target, None, quantize)
        return ChainDrafter(head, target.vocab_size, length)
    block = DSparkNetwork if kind == "dspark" else DFlashNetwork
    network = block(config, tensors, "a test", target, None, quantize)
    return BlockDrafter(network, target.vocab_size, length)


def new_drafter(kind: str, target: Decoder, length: int = 5) -> Drafter:
    """A drafter of one of the kinds below, with its random weights."""
    return build(kind, PUBLISHED[kind](), target, length)


PUBLISHED: dict[str, Callable[[], Published]] = {
    "mtp": mtp,
    "eagle3": eagle3,
    "dflash": dflash,
    "dflash2": lambda: dflash(2),
    "dspark": dspark,
}
KINDS = tuple(PUBLISHED)
