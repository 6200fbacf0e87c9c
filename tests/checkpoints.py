"""Tiny random checkpoints in the form in which each family is published."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

Config = dict[str, Any]
Tensors = dict[str, mx.array]

_BASE: Config = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 97,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
    "truncate": False,
}
_FIELDS: dict[str, Config] = {
    "llama": {"rope_scaling": _LLAMA3, "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None, "tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True, "use_sliding_window": False},
    "qwen3": {"head_dim": 32, "attention_bias": False},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    },
    "olmoe": {
        "intermediate_size": 64,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
    },
    "granitemoe": {
        "intermediate_size": 64,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "attention_bias": False,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.3,
        "logits_scaling": 4.0,
        "tie_word_embeddings": True,
    },
    "glm4_moe": {
        "num_hidden_layers": 4,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "n_group": 2,
        "topk_group": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "num_nextn_predict_layers": 1,
    },
    "gpt_oss": {
        "num_hidden_layers": 4,
        "intermediate_size": 64,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_theta": 150000,
        "rope_scaling": _YARN,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "ernie4_5_moe": {
        "use_bias": False,  # mlx-lm cannot read per-expert biases
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
        "moe_layer_interval": 1,
        "tie_word_embeddings": True,
    },
}
FAMILIES = tuple(_FIELDS)


def hf_config(family: str) -> Config:
    """Return a small config.json with the family's own field names."""
    config = {"model_type": family, "architectures": [family]} | _BASE | _FIELDS[family]
    if family in ("qwen2", "mixtral", "qwen2_moe", "olmoe", "granitemoe"):
        del config["head_dim"]  # these publish hidden_size and heads only
    return config


class _Writer:
    """Draws tensors one after the other, scaled so that details show in the logits."""

    def __init__(self, config: Config, seed: int) -> None:
        self.config = config
        self.tensors: Tensors = {}
        self._key = mx.random.key(seed)

    def _normal(self, shape: tuple[int, ...], scale: float) -> mx.array:
        self._key, key = mx.random.split(self._key)
        return mx.random.normal(shape, scale=scale, key=key)

    def matrix(self, name: str, *shape: int) -> None:
        scale = 1.5 * shape[-1] ** -0.5
        self.tensors[f"{name}.weight"] = self._normal(shape, scale)

    def linear(self, name: str, out: int, width: int, bias: bool = False) -> None:
        self.matrix(name, out, width)
        if bias:
            self.vector(f"{name}.bias", out)

    def vector(self, name: str, *shape: int, scale: float = 0.3) -> None:
        self.tensors[name] = self._normal(shape, scale)

    def norm(self, name: str, size: int) -> None:
        self.tensors[f"{name}.weight"] = 1 + self._normal((size,), 0.2)

    def packed(self, name: str, *shape: int) -> None:
        """Published mxfp4: blocks (…, rows, width/32, 16) uint8, scales (…) uint8."""
        value = self._normal(shape, 1.5 * shape[-1] ** -0.5)
        weight, scales = mx.quantize(value, group_size=32, bits=4, mode="mxfp4")
        blocks = weight.view(mx.uint8).reshape(*shape[:-1], shape[-1] // 32, 16)
        self.tensors[f"{name}_blocks"] = blocks
        self.tensors[f"{name}_scales"] = scales


def hf_weights(config: Config, seed: int = 0) -> Tensors:
    """Return float32 tensors under their published names."""
    writer = _Writer(config, seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    writer.matrix("model.embed_tokens", vocab, hidden)
    writer.norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        writer.matrix("lm_head", vocab, hidden)
    extra = config.get("num_nextn_predict_layers", 0)
    for layer in range(config["num_hidden_layers"] + extra):
        prefix = f"model.layers.{layer}"
        writer.norm(f"{prefix}.input_layernorm", hidden)
        writer.norm(f"{prefix}.post_attention_layernorm", hidden)
        _write_attention(writer, f"{prefix}.self_attn")
        _write_feed_forward(writer, prefix, layer)
    if config["model_type"] == "ernie4_5_moe":
        writer.norm("model.mtp_emb_norm.0", hidden)
        writer.matrix("model.mtp_linear_proj.0", hidden, 2 * hidden)
        writer.vector("model.layers.1.mlp.moe_statics.e_score_correction_bias", 1, 6)
    return writer.tensors


def _write_attention(writer: _Writer, prefix: str) -> None:
    c = writer.config
    family, heads, kv_heads = (
        c["model_type"],
        c["num_attention_heads"],
        c["num_key_value_heads"],
    )
    dim = c.get("head_dim") or c["hidden_size"] // heads
    bias = (
        family in ("qwen2", "qwen2_moe")
        or c.get("attention_bias", False)
        or c.get("use_bias", False)
    )
    hidden = c["hidden_size"]
    writer.linear(f"{prefix}.q_proj", heads * dim, hidden, bias)
    writer.linear(f"{prefix}.k_proj", kv_heads * dim, hidden, bias)
    writer.linear(f"{prefix}.v_proj", kv_heads * dim, hidden, bias)
    o_bias = bias and family not in ("qwen2", "qwen2_moe", "glm4_moe")
    writer.linear(f"{prefix}.o_proj", hidden, heads * dim, o_bias)
    if family in ("qwen3", "qwen3_moe", "glm4_moe"):
        writer.norm(f"{prefix}.q_norm", dim)
        writer.norm(f"{prefix}.k_norm", dim)
    if family == "olmoe":
        writer.norm(f"{prefix}.q_norm", heads * dim)
        writer.norm(f"{prefix}.k_norm", kv_heads * dim)
    if family == "gpt_oss":
        writer.vector(f"{prefix}.sinks", heads, scale=1.0)


def _write_feed_forward(writer: _Writer, prefix: str, layer: int) -> None:
    c = writer.config
    match c["model_type"]:
        case "mixtral":
            _write_mixtral(writer, f"{prefix}.block_sparse_moe")
        case "granitemoe":
            _write_granite(writer, f"{prefix}.block_sparse_moe")
        case "gpt_oss":
            _write_gpt_oss(writer, f"{prefix}.mlp")
        case "qwen2_moe":
            _write_experts(writer, f"{prefix}.mlp", c["num_experts"])
            width, hidden = c["shared_expert_intermediate_size"], c["hidden_size"]
            _write_dense(writer, f"{prefix}.mlp.shared_expert", width)
            writer.matrix(f"{prefix}.mlp.shared_expert_gate", 1, hidden)
        case "olmoe":
            _write_experts(writer, f"{prefix}.mlp", c["num_experts"])
        case "qwen3_moe" if layer not in c["mlp_only_layers"]:
            _write_experts(writer, f"{prefix}.mlp", c["num_experts"])
        case "glm4_moe" if layer >= c["first_k_dense_replace"]:
            experts = c["n_routed_experts"]
            _write_experts(writer, f"{prefix}.mlp", experts)
            name = f"{prefix}.mlp.gate.e_score_correction_bias"
            writer.vector(name, experts, scale=0.5)
            width = c["moe_intermediate_size"] * c["n_shared_experts"]
            _write_dense(writer, f"{prefix}.mlp.shared_experts", width)
        case "ernie4_5_moe" if layer >= c["moe_layer_start_index"]:
            bias = c["use_bias"]
            _write_experts(writer, f"{prefix}.mlp", c["moe_num_experts"], bias)
            width = c["moe_intermediate_size"] * c["moe_num_shared_experts"]
            _write_dense(writer, f"{prefix}.mlp.shared_experts", width, bias)
        case _:
            bias = c.get("mlp_bias", False) or c.get("use_bias", False)
            _write_dense(writer, f"{prefix}.mlp", c["intermediate_size"], bias)


def _write_dense(writer: _Writer, prefix: str, width: int, bias: bool = False) -> None:
    hidden = writer.config["hidden_size"]
    writer.linear(f"{prefix}.gate_proj", width, hidden, bias)
    writer.linear(f"{prefix}.up_proj", width, hidden, bias)
    writer.linear(f"{prefix}.down_proj", hidden, width, bias)


def _write_experts(
    writer: _Writer, prefix: str, count: int, bias: bool = False
) -> None:
    c = writer.config
    width = c.get("moe_intermediate_size", c["intermediate_size"])
    writer.matrix(f"{prefix}.gate", count, c["hidden_size"])
    for expert in range(count):
        _write_dense(writer, f"{prefix}.experts.{expert}", width, bias)


def _write_mixtral(writer: _Writer, prefix: str) -> None:
    c = writer.config
    hidden, width = c["hidden_size"], c["intermediate_size"]
    writer.matrix(f"{prefix}.gate", c["num_local_experts"], hidden)
    for expert in range(c["num_local_experts"]):
        writer.matrix(f"{prefix}.experts.{expert}.w1", width, hidden)
        writer.matrix(f"{prefix}.experts.{expert}.w2", hidden, width)
        writer.matrix(f"{prefix}.experts.{expert}.w3", width, hidden)


def _write_granite(writer: _Writer, prefix: str) -> None:
    c = writer.config
    hidden, width, count = (
        c["hidden_size"],
        c["intermediate_size"],
        c["num_local_experts"],
    )
    writer.matrix(f"{prefix}.router.layer", count, hidden)
    writer.matrix(f"{prefix}.input_linear", count, 2 * width, hidden)
    writer.matrix(f"{prefix}.output_linear", count, hidden, width)


def _write_gpt_oss(writer: _Writer, prefix: str) -> None:
    c = writer.config
    hidden, width, count = (
        c["hidden_size"],
        c["intermediate_size"],
        c["num_local_experts"],
    )
    writer.linear(f"{prefix}.router", count, hidden, True)
    writer.packed(f"{prefix}.experts.gate_up_proj", count, 2 * width, hidden)
    writer.vector(f"{prefix}.experts.gate_up_proj_bias", count, 2 * width)
    writer.packed(f"{prefix}.experts.down_proj", count, hidden, width)
    writer.vector(f"{prefix}.experts.down_proj_bias", count, hidden)


def write_checkpoint(
    folder: Path,
    family: str,
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Write config.json and model.safetensors; return the folder."""
    config = hf_config(family) | dict(overrides or {})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = hf_weights(config, seed)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    return folder


def write_quantized(
    folder: Path, source: Path, bits: int, group_size: int = 32
) -> Path:
    """Quantize a checkpoint with mlx-lm and save it in mlx-lm's own form."""
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model

    model, config = load_model(source)
    predicate = getattr(model, "quant_predicate", None)

    def chosen(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):
            return False
        verdict = True if predicate is None else predicate(path, module)
        if isinstance(verdict, dict):
            verdict = verdict | {"mode": "affine"}
            overrides[path] = verdict
        return verdict

    overrides: Config = {}
    nn.quantize(model, group_size, bits, class_predicate=chosen)
    config.pop("quantization_config", None)
    config["quantization"] = {"group_size": group_size, "bits": bits} | overrides
    _keep_packed_experts(model, config)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    return folder


def _keep_packed_experts(model: Any, config: Config) -> None:
    """Name the modules that were packed in another mode before."""
    for path, module in model.named_modules():
        if getattr(module, "mode", "affine") != "affine":
            config["quantization"][path] = {
                "group_size": module.group_size,
                "bits": module.bits,
                "mode": module.mode,
            }


_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer with ``vocab_size`` tokens and a ChatML template."""
    if vocab_size < 260:
        raise ValueError(f"{vocab_size} tokens cannot hold all bytes")
    from tokenizers.pre_tokenizers import ByteLevel

    special = ["<|im_start|>", "<|im_end|>"]
    letters = sorted(ByteLevel.alphabet())
    spare = [f"<|spare{i}|>" for i in range(vocab_size - len(special) - len(letters))]
    vocab = {token: i for i, token in enumerate([*special, *letters, *spare])}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    added = [
        {
            "id": vocab[token],
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token in special
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
