"""Tiny random checkpoints in the form in which each family is published.

Field and tensor names are the published ones; sizes are small, and values are
chosen so that every detail of a forward pass shows in the logits.
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx

Config = dict[str, Any]
Tensors = dict[str, mx.array]

_BASE: Config = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-2,  # large enough to be seen
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.55.0",
    "use_cache": True,
    "vocab_size": 97,
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
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 128,
    "truncate": False,
}
_ROUTED: Config = {
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.01,
}
_QWEN: Config = {
    "max_window_layers": 3,
    "sliding_window": None,
    "use_sliding_window": False,
}
_QWEN3 = {"attention_bias": False, "head_dim": 32, "rope_scaling": None}
_UNPACKED = ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
_PACKED_EXPERTS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [*_UNPACKED, "model.embed_tokens", "lm_head"],
}
_FIELDS: dict[str, Config] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "eos_token_id": [2, 3],
        "mlp_bias": True,
        "pretraining_tp": 1,
        "rope_scaling": _LLAMA3,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "head_dim": 32,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN
    | {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": _QWEN
    | _QWEN3
    | {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "mixtral": _ROUTED
    | {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 6,
        "sliding_window": None,
    },
    "qwen2_moe": _QWEN
    | _ROUTED
    | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 64,
        "norm_topk_prob": False,
        "num_experts": 6,
        "shared_expert_intermediate_size": 128,
    },
    "qwen3_moe": _QWEN
    | _QWEN3
    | _ROUTED
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "num_experts": 6,
    },
    "olmoe": _ROUTED
    | {
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": False,
        "clip_qkv": None,
        "intermediate_size": 64,
        "norm_topk_prob": False,
        "num_experts": 6,
        "pad_token_id": 1,
        "rope_scaling": None,
    },
    "granitemoe": _ROUTED
    | {
        "architectures": ["GraniteMoeForCausalLM"],
        "attention_bias": False,
        "attention_multiplier": 0.1,
        "embedding_multiplier": 3.0,
        "intermediate_size": 64,
        "logits_scaling": 4.0,
        "num_local_experts": 6,
        "residual_multiplier": 0.3,
        "rope_scaling": None,
        "tie_word_embeddings": True,
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "eos_token_id": [2, 3, 4],
        "first_k_dense_replace": 1,
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "n_group": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "routed_scaling_factor": 1.5,
        "topk_group": 1,
        "use_qk_norm": True,
    },
    "gpt_oss": _ROUTED
    | {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "experts_per_token": 2,
        "head_dim": 32,
        "initial_context_length": 128,
        "intermediate_size": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "max_position_embeddings": 4096,
        "num_hidden_layers": 4,
        "num_local_experts": 6,
        "quantization_config": _PACKED_EXPERTS,
        "rope_scaling": _YARN,
        "rope_theta": 150000,
        "sliding_window": 8,
        "swiglu_limit": 7.0,
    },
    "ernie4_5_moe": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "moe_capacity": [6, 6, 6],
        "moe_intermediate_size": 64,
        "moe_k": 2,
        "moe_layer_end_index": 2,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_num_experts": 6,
        "moe_num_shared_experts": 2,
        "moe_use_aux_free": True,
        "num_hidden_layers": 4,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": True,
        "use_bias": False,  # mlx-lm cannot read per-expert biases
    },
}
FAMILIES: tuple[str, ...] = tuple(_FIELDS)


def hf_config(family: str) -> Config:
    """Return a small config.json with the family's own field names."""
    return deepcopy(_BASE | {"model_type": family} | _FIELDS[family])


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

    def packed(self, name: str, *shape: int, gain: float) -> None:
        """Draw mxfp4 blocks (…, rows, width/32, 16) and their scales (…), uint8."""
        value = self._normal(shape, gain * shape[-1] ** -0.5)
        weight, scales, *_ = mx.quantize(value, group_size=32, bits=4, mode="mxfp4")
        blocks = weight.view(mx.uint8).reshape(*shape[:-1], shape[-1] // 32, 16)
        self.tensors[f"{name}_blocks"] = blocks
        self.tensors[f"{name}_scales"] = scales


def hf_weights(config: Config, seed: int = 0) -> Tensors:
    """Return float32 (packed parts: uint8) tensors under their published names."""
    writer = _Writer(config, seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    writer.matrix("model.embed_tokens", vocab, hidden)
    writer.norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        writer.matrix("lm_head", vocab, hidden)
    sparse = _sparse_layers(config)
    for layer in range(config["num_hidden_layers"]):
        _write_layer(writer, f"model.layers.{layer}", layer in sparse)
    _write_next_token_layer(writer)
    return writer.tensors


def _sparse_layers(config: Config) -> set[int]:
    """Return the layers whose feed-forward part is a mixture of experts."""
    layers = range(config["num_hidden_layers"])
    match config["model_type"]:
        case "llama" | "mistral" | "qwen2" | "qwen3":
            return set()
        case "qwen2_moe" | "qwen3_moe":
            step = config["decoder_sparse_step"]
            return set(layers[step - 1 :: step]) - set(
                config.get("mlp_only_layers", ())
            )
        case "glm4_moe":
            return set(layers[config["first_k_dense_replace"] :])
        case "ernie4_5_moe":
            first, last = config["moe_layer_start_index"], config["moe_layer_end_index"]
            step = config["moe_layer_interval"]
            return set(layers[step - 1 :: step]) & set(range(first, last + 1))
        case _:
            return set(layers)


def _write_layer(writer: _Writer, prefix: str, is_sparse: bool) -> None:
    hidden = writer.config["hidden_size"]
    writer.norm(f"{prefix}.input_layernorm", hidden)
    writer.norm(f"{prefix}.post_attention_layernorm", hidden)
    _write_attention(writer, f"{prefix}.self_attn")
    if is_sparse:
        _write_sparse(writer, prefix)
    else:
        c = writer.config
        bias = c.get("mlp_bias", False) or c.get("use_bias", False)
        _write_dense(writer, f"{prefix}.mlp", c["intermediate_size"], bias)


def _write_next_token_layer(writer: _Writer) -> None:
    """Write the multi-token-prediction layer, which plain decoding drops."""
    c = writer.config
    if not c.get("num_nextn_predict_layers"):
        return
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    if c["model_type"] == "glm4_moe":
        prefix = f"model.layers.{c['num_hidden_layers']}"
        _write_layer(writer, prefix, True)
        writer.matrix(f"{prefix}.embed_tokens", vocab, hidden)
        writer.norm(f"{prefix}.enorm", hidden)
        writer.norm(f"{prefix}.hnorm", hidden)
        writer.matrix(f"{prefix}.eh_proj", hidden, 2 * hidden)
        writer.norm(f"{prefix}.shared_head.norm", hidden)
        writer.matrix(f"{prefix}.shared_head.head", vocab, hidden)
    else:
        _write_layer(writer, "model.mtp_block.0", False)
        writer.norm("model.mtp_emb_norm.0", hidden)
        writer.norm("model.mtp_hidden_norm.0", hidden)
        writer.matrix("model.mtp_linear_proj.0", hidden, 2 * hidden)


def _write_attention(writer: _Writer, prefix: str) -> None:
    c = writer.config
    family, hidden = c["model_type"], c["hidden_size"]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    dim = c.get("head_dim") or hidden // heads
    is_qwen2 = family in ("qwen2", "qwen2_moe")
    bias = is_qwen2 or c.get("attention_bias", False) or c.get("use_bias", False)
    writer.linear(f"{prefix}.q_proj", heads * dim, hidden, bias)
    writer.linear(f"{prefix}.k_proj", kv_heads * dim, hidden, bias)
    writer.linear(f"{prefix}.v_proj", kv_heads * dim, hidden, bias)
    o_bias = bias and not is_qwen2 and family != "glm4_moe"
    writer.linear(f"{prefix}.o_proj", hidden, heads * dim, o_bias)
    if family in ("qwen3", "qwen3_moe") or c.get("use_qk_norm", False):
        writer.norm(f"{prefix}.q_norm", dim)
        writer.norm(f"{prefix}.k_norm", dim)
    if family == "olmoe":
        writer.norm(f"{prefix}.q_norm", heads * dim)
        writer.norm(f"{prefix}.k_norm", kv_heads * dim)
    if family == "gpt_oss":
        writer.vector(f"{prefix}.sinks", heads, scale=1.0)


def _write_sparse(writer: _Writer, prefix: str) -> None:
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
            width = c["shared_expert_intermediate_size"]
            _write_dense(writer, f"{prefix}.mlp.shared_expert", width)
            writer.matrix(f"{prefix}.mlp.shared_expert_gate", 1, c["hidden_size"])
        case "glm4_moe":
            _write_experts(writer, f"{prefix}.mlp", c["n_routed_experts"])
            name = f"{prefix}.mlp.gate.e_score_correction_bias"
            writer.vector(name, c["n_routed_experts"])
            # Positive: experts of dropped groups score 0 and must never be chosen.
            writer.tensors[name] = mx.abs(writer.tensors[name])
            _write_shared(writer, f"{prefix}.mlp", c["n_shared_experts"])
        case "ernie4_5_moe":
            count, bias = c["moe_num_experts"], c["use_bias"]
            _write_experts(writer, f"{prefix}.mlp", count, bias)
            name = f"{prefix}.mlp.moe_statics.e_score_correction_bias"
            writer.vector(name, 1, count)
            _write_shared(writer, f"{prefix}.mlp", c["moe_num_shared_experts"], bias)
        case _:
            _write_experts(writer, f"{prefix}.mlp", c["num_experts"])


def _write_dense(writer: _Writer, prefix: str, width: int, bias: bool = False) -> None:
    hidden = writer.config["hidden_size"]
    writer.linear(f"{prefix}.gate_proj", width, hidden, bias)
    writer.linear(f"{prefix}.up_proj", width, hidden, bias)
    writer.linear(f"{prefix}.down_proj", hidden, width, bias)


def _write_experts(
    writer: _Writer, prefix: str, count: int, bias: bool = False
) -> None:
    c = writer.config
    width = c.get("moe_intermediate_size") or c["intermediate_size"]
    writer.matrix(f"{prefix}.gate", count, c["hidden_size"])
    for expert in range(count):
        _write_dense(writer, f"{prefix}.experts.{expert}", width, bias)


def _write_shared(
    writer: _Writer, prefix: str, count: int | None, bias: bool = False
) -> None:
    if count:
        width = count * writer.config["moe_intermediate_size"]
        _write_dense(writer, f"{prefix}.shared_experts", width, bias)


def _expert_sizes(c: Config) -> tuple[int, int, int]:
    """Return hidden width, expert width and number of experts."""
    return c["hidden_size"], c["intermediate_size"], c["num_local_experts"]


def _write_mixtral(writer: _Writer, prefix: str) -> None:
    hidden, width, count = _expert_sizes(writer.config)
    writer.matrix(f"{prefix}.gate", count, hidden)
    for expert in range(count):
        writer.matrix(f"{prefix}.experts.{expert}.w1", width, hidden)
        writer.matrix(f"{prefix}.experts.{expert}.w2", hidden, width)
        writer.matrix(f"{prefix}.experts.{expert}.w3", width, hidden)


def _write_granite(writer: _Writer, prefix: str) -> None:
    hidden, width, count = _expert_sizes(writer.config)
    writer.matrix(f"{prefix}.router.layer", count, hidden)
    writer.matrix(f"{prefix}.input_linear", count, 2 * width, hidden)
    writer.matrix(f"{prefix}.output_linear", count, hidden, width)


def _write_gpt_oss(writer: _Writer, prefix: str) -> None:
    hidden, width, count = _expert_sizes(writer.config)
    experts = f"{prefix}.experts"
    writer.linear(f"{prefix}.router", count, hidden, True)
    writer.packed(f"{experts}.gate_up_proj", count, 2 * width, hidden, gain=1.5)
    # Wide enough that the activation's clamp at 7 is reached.
    writer.vector(f"{experts}.gate_up_proj_bias", count, 2 * width, scale=4.0)
    writer.packed(f"{experts}.down_proj", count, hidden, width, gain=0.2)
    writer.vector(f"{experts}.down_proj_bias", count, hidden)


def write_checkpoint(
    folder: Path,
    family: str,
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Write config.json and model.safetensors; return the folder."""
    changes = dict(overrides or {})
    config = hf_config(family) | changes
    if "layer_types" in config and "layer_types" not in changes:
        depth = config["num_hidden_layers"]
        config["layer_types"] = (config["layer_types"] * depth)[:depth]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = hf_weights(config, seed)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    return folder


def write_text_checkpoint(folder: Path, family: str = "qwen3_moe") -> Path:
    """Write a checkpoint of 300 tokens with its tokenizer; return the folder."""
    write_checkpoint(folder, family, overrides={"vocab_size": 300})
    write_tokenizer(folder, 300)
    return folder


def write_quantized(
    folder: Path, source: Path, bits: int, group_size: int = 32
) -> Path:
    """Quantize a checkpoint as mlx-lm's converter does (packed experts stay so)."""
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    model, config = load_model(source)
    model, config = quantize_model(model, config, group_size, bits)
    save_model(folder, model)
    save_config(config, folder / "config.json")
    return folder


_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # the config's eos is 2
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_VERBATIM = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer with ``vocab_size`` tokens and a ChatML template."""
    if vocab_size < 260:
        raise ValueError(f"{vocab_size} tokens cannot hold all bytes")
    from tokenizers.pre_tokenizers import ByteLevel

    known = [*_SPECIAL, *sorted(ByteLevel.alphabet())]
    spare = [f"<{i}>" for i in range(vocab_size - len(known))]
    vocab = {token: i for i, token in enumerate([*known, *spare])}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": vocab[token], "content": token, "special": True} | _VERBATIM
            for token in _SPECIAL
        ],
        "pre_tokenizer": _BYTE_LEVEL,
        "decoder": _BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": _TEMPLATE,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
