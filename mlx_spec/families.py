"""How each model family writes its config.json and names its tensors.

A family is one table entry: a function from the published config fields to
``ModelConfig`` fields, and the tensor names that differ from our canonical ones
(``model.layers.N.{self_attn,mlp}…``, experts stacked in ``mlp.experts``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_spec.errors import LoadError

HfConfig = Mapping[str, Any]
Fields = dict[str, Any]

GATED_NAMES = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
MIXTRAL_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    Attributes:
        fields: From the published config to the fields of ``ModelConfig``.
        renames: ``(published part, canonical part)`` of tensor names, applied in order.
        expert_names: Published name of each per-expert matrix to the canonical one.
        dropped: Parts of tensor names that no forward pass here uses.
    """

    fields: Callable[[HfConfig], Fields]
    renames: tuple[tuple[str, str], ...] = ()
    expert_names: Mapping[str, str] | None = None
    dropped: tuple[str, ...] = ()


def family_of(hf: HfConfig) -> Family:
    """Return the family of a published config.

    Raises:
        LoadError: If ``model_type`` is missing or not in the table.
    """
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise LoadError(
            f"model_type {model_type!r} is not supported",
            f"supported: {', '.join(sorted(FAMILIES))}",
        )
    return FAMILIES[model_type]


def _required(hf: HfConfig, name: str) -> Any:
    if hf.get(name) is None:
        raise LoadError(
            f"config.json of model_type {hf.get('model_type')!r} has no {name!r}",
            "the checkpoint is incomplete or not of this family",
        )
    return hf[name]


def _common(hf: HfConfig, tied: bool) -> Fields:
    """Fields that all families share; ``tied`` is the family's default."""
    heads = _required(hf, "num_attention_heads")
    hidden = _required(hf, "hidden_size")
    rope = hf.get("rope_parameters") or {}
    layer_types = tuple(hf.get("layer_types") or ())
    is_sliding = "sliding_attention" in layer_types
    return {
        "model_type": hf["model_type"],
        "vocab_size": _required(hf, "vocab_size"),
        "hidden_size": hidden,
        "num_hidden_layers": _required(hf, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": hf.get("head_dim") or hidden // heads,
        "intermediate_size": hf.get("intermediate_size") or 0,
        "rms_norm_eps": hf.get("rms_norm_eps", 1e-5),
        "max_position_embeddings": hf.get("max_position_embeddings"),
        "tie_word_embeddings": hf.get("tie_word_embeddings", tied),
        "rope_theta": hf.get("rope_theta") or rope.get("rope_theta") or 10000.0,
        "rope_scaling": hf.get("rope_scaling") or _scaled(rope),
        "rope_traditional": hf.get("rope_traditional", False),
        "layer_types": layer_types if is_sliding else (),
        "sliding_window": hf.get("sliding_window") if is_sliding else None,
    }


def _scaled(rope: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Newer configs keep theta and scaling together; plain RoPE is no scaling."""
    return rope if rope.get("rope_type", "default") != "default" else None


def _llama(hf: HfConfig) -> Fields:
    bias = hf.get("attention_bias", False)
    return _common(hf, tied=True) | {
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": hf.get("mlp_bias", False),
    }


def _qwen2(hf: HfConfig) -> Fields:
    return _common(hf, tied=True) | {"qkv_bias": True}


def _qwen3(hf: HfConfig) -> Fields:
    return _common(hf, tied=False) | {"qk_norm": "head"}


def _mixtral(hf: HfConfig) -> Fields:
    return _common({"rope_theta": 1e6} | dict(hf), tied=False) | {
        "num_experts": _required(hf, "num_local_experts"),
        "num_experts_per_tok": hf.get("num_experts_per_tok", 2),
        "moe_intermediate_size": hf["intermediate_size"],
        "router_scoring": "topk_softmax",
    }


def _qwen_experts(hf: HfConfig) -> Fields:
    return {
        "num_experts": _required(hf, "num_experts"),
        "num_experts_per_tok": _required(hf, "num_experts_per_tok"),
        "moe_intermediate_size": _required(hf, "moe_intermediate_size"),
        "norm_topk_prob": hf.get("norm_topk_prob", False),
        "decoder_sparse_step": hf.get("decoder_sparse_step", 1),
        "mlp_only_layers": tuple(hf.get("mlp_only_layers") or ()),
    }


def _qwen2_moe(hf: HfConfig) -> Fields:
    base = _common({"rope_theta": 1e6} | dict(hf), tied=False)
    return (
        base
        | _qwen_experts(hf)
        | {
            "qkv_bias": True,
            "shared_expert_size": _required(hf, "shared_expert_intermediate_size"),
            "shared_expert_gated": True,
        }
    )


def _qwen3_moe(hf: HfConfig) -> Fields:
    base = _common(hf, tied=False) | _qwen_experts(hf)
    return base | {"qk_norm": "head", "router_from_end": True}


def _olmoe(hf: HfConfig) -> Fields:
    bias = hf.get("attention_bias", False)
    return _common(hf, tied=True) | {
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": "full",
        "num_experts": _required(hf, "num_experts"),
        "num_experts_per_tok": _required(hf, "num_experts_per_tok"),
        "moe_intermediate_size": hf["intermediate_size"],
        "norm_topk_prob": hf.get("norm_topk_prob", False),
    }


def _granitemoe(hf: HfConfig) -> Fields:
    bias = hf.get("attention_bias", False)
    return _common(hf, tied=True) | {
        "qkv_bias": bias,
        "o_bias": bias,
        "num_experts": _required(hf, "num_local_experts"),
        "num_experts_per_tok": _required(hf, "num_experts_per_tok"),
        "moe_intermediate_size": hf["intermediate_size"],
        "router_scoring": "topk_softmax",
        "router_float32": True,
        "router_from_end": True,
        "attention_scale": hf.get("attention_multiplier", 1.0),
        "embedding_multiplier": hf.get("embedding_multiplier", 1.0),
        "residual_multiplier": hf.get("residual_multiplier", 1.0),
        "logits_scaling": hf.get("logits_scaling", 1.0),
    }


def _glm4_moe(hf: HfConfig) -> Fields:
    width = _required(hf, "moe_intermediate_size")
    return _common(hf, tied=False) | {
        "qkv_bias": hf.get("attention_bias", False),
        "qk_norm": "head" if hf.get("use_qk_norm", False) else "none",
        "partial_rotary_factor": hf.get("partial_rotary_factor", 1.0),
        "num_experts": _required(hf, "n_routed_experts"),
        "num_experts_per_tok": _required(hf, "num_experts_per_tok"),
        "moe_intermediate_size": width,
        "num_shared_experts": hf.get("n_shared_experts") or 0,
        "first_k_dense_replace": hf.get("first_k_dense_replace", 0),
        "router_scoring": "sigmoid",
        "router_float32": True,
        "router_correction_bias": True,
        "norm_topk_prob": hf.get("norm_topk_prob", True)
        and hf["num_experts_per_tok"] > 1,
        "routed_scaling_factor": hf.get("routed_scaling_factor", 1.0),
        "n_group": hf.get("n_group", 1),
        "topk_group": hf.get("topk_group", 1),
    }


def _gpt_oss(hf: HfConfig) -> Fields:
    layers = _required(hf, "num_hidden_layers")
    alternating = ("sliding_attention", "full_attention") * ((layers + 1) // 2)
    defaults = {"layer_types": alternating[:layers], "sliding_window": 128}
    return _common(defaults | dict(hf), tied=False) | {
        "qkv_bias": True,
        "o_bias": True,
        "attention_sinks": True,
        "num_experts": _required(hf, "num_local_experts"),
        "num_experts_per_tok": hf.get("num_experts_per_tok", 4),
        "moe_intermediate_size": hf["intermediate_size"],
        "router_scoring": "topk_softmax",
        "router_bias": True,
        "router_from_end": True,
        "expert_bias": True,
        "activation": "swiglu_oai",
    }


def _ernie4_5_moe(hf: HfConfig) -> Fields:
    bias = hf.get("use_bias", False)
    width = hf.get("moe_intermediate_size") or hf["intermediate_size"]
    start, end = hf.get("moe_layer_start_index", 0), hf.get("moe_layer_end_index")
    return _common(hf, tied=True) | {
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bias,
        "expert_bias": bias,
        "rope_traditional": True,
        "num_experts": _required(hf, "moe_num_experts"),
        "num_experts_per_tok": hf.get("moe_k", 1),
        "moe_intermediate_size": width,
        "num_shared_experts": hf.get("moe_num_shared_experts") or 0,
        "first_k_dense_replace": min(start) if isinstance(start, list) else start,
        "last_moe_layer": max(end) if isinstance(end, list) else end,
        "decoder_sparse_step": hf.get("moe_layer_interval", 1),
        "router_scoring": hf.get("moe_gate_act", "softmax"),
        "router_float32": True,
        "norm_topk_prob": True,
    }


_SHARED_EXPERT = (".mlp.shared_expert.", ".mlp.shared_experts.")
_SWITCH = (".mlp.switch_mlp.", ".mlp.experts.")

FAMILIES: Mapping[str, Family] = {
    "llama": Family(_llama),
    "mistral": Family(_llama),
    "qwen2": Family(_qwen2),
    "qwen3": Family(_qwen3),
    "mixtral": Family(
        _mixtral, ((".block_sparse_moe.", ".mlp."), _SWITCH), MIXTRAL_NAMES
    ),
    "qwen2_moe": Family(_qwen2_moe, (_SWITCH, _SHARED_EXPERT), GATED_NAMES),
    "qwen3_moe": Family(_qwen3_moe, (_SWITCH,), GATED_NAMES),
    "olmoe": Family(_olmoe, (_SWITCH,), GATED_NAMES),
    "granitemoe": Family(
        _granitemoe,
        (
            (".block_sparse_moe.", ".mlp."),
            _SWITCH,
            (".mlp.router.layer.", ".mlp.gate."),
            (".mlp.input_linear.", ".mlp.experts.gate_up_proj."),
            (".mlp.output_linear.", ".mlp.experts.down_proj."),
        ),
    ),
    "glm4_moe": Family(_glm4_moe, (_SWITCH,), GATED_NAMES),
    "gpt_oss": Family(_gpt_oss, ((".mlp.router.", ".mlp.gate."),)),
    "ernie4_5_moe": Family(
        _ernie4_5_moe,
        (_SWITCH,),
        GATED_NAMES,
        ("mtp_", "e_score_correction_bias"),
    ),
}
