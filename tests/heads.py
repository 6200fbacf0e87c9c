"""Drafters with random weights in the published layouts, for a tiny target."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlx_spec import Decoder
from mlx_spec.draft import Drafter
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.dflash import DFlashDrafter, DFlashNetwork
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
_SHARED = {
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
        is_norm = "norm" in name.split(".")[-2] and len(shape) == 1
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


def eagle3(layer: str = "midlayer") -> Published:
    """An EAGLE-3 head with a reduced vocabulary, in the original packaging."""
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
    tensors = random_tensors(shapes, 2)
    ids = mx.arange(DRAFT_VOCAB) * 2 + 3
    tensors["d2t"] = (ids - mx.arange(DRAFT_VOCAB)).astype(mx.int64)
    tensors["t2d"] = mx.zeros((V,), mx.bool_)
    config = _SHARED | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": TAPS},
    }
    return config, tensors


def dflash(version: int = 1) -> Published:
    """A DFlash head of two layers; the second version has all that it adds."""
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
        if version == 2:
            for part in ("attention_conv", "mlp_conv"):
                shapes[f"{layer}.{part}.base_kernel"] = (2, 2, H)
                shapes[f"{layer}.{part}.kernel_projection.weight"] = (4 * H // 8, H)
    special: dict[str, Any] = {"target_layer_ids": TAPS, "mask_token_id": 4}
    if version == 2:
        special |= {"conv_kernel_size": 2, "conv_group_size": 8}
        special |= {"selector_rank": 6, "selector_top_k": 5}
        shapes["candidate_selector.predecessor_codebook"] = (V, 6)
        shapes["candidate_selector.successor_codebook"] = (V, 6)
        shapes["candidate_selector.hidden_projection.weight"] = (6, H)
    config = _SHARED | {
        "architectures": ["DFlashDraftModel" if version == 1 else "DFlash2DraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "block_size": 6,
        "num_target_layers": TARGET["num_hidden_layers"],
        "dflash_config": special,
    }
    return config, random_tensors(shapes, 2 + version)


def new_drafter(kind: str, target: Decoder, length: int = 5) -> Drafter:
    """A drafter of one of the kinds below, with its random weights."""
    if kind == "mtp":
        head = MTPHead(*mtp(), "a test", target, None)
        return ChainDrafter(head, target.vocab_size, length)
    if kind == "eagle3":
        return ChainDrafter(
            Eagle3Head(*eagle3(), "a test", target, None), target.vocab_size, length
        )
    network = DFlashNetwork(
        *dflash(2 if kind == "dflash2" else 1), "a test", target, None
    )
    return DFlashDrafter(network, target.vocab_size, length)


KINDS = ("mtp", "eagle3", "dflash", "dflash2")
