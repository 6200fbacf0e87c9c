"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one layer on fused target features."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlx_spec.attention import Attention, attention_mask
from mlx_spec.cache import KVCache
from mlx_spec.config import ModelConfig
from mlx_spec.decoder import rope_of
from mlx_spec.drafters.parts import (
    DraftHead,
    canonical_names,
    check_size,
    check_taps,
    finished,
    token_embedding,
)
from mlx_spec.moe import DenseFeedForward
from mlx_spec.target import Features, FeatureTarget
from mlx_spec.tensor_file import Tensors
from mlx_spec.weights import CheckpointWeights


class Eagle3Head:
    """The network of an EAGLE-3 checkpoint.

    Args:
        hf: Its config.json, in the original, the SpecForge or the speculators form.
        tensors: Its tensors.
        source: Its folder, for messages.
        target: Lends embedding and head where the checkpoint has none.
        dtype: Of the arithmetic; None keeps the checkpoint's.
        quantize: 4 or 8 to pack its matrices, None to leave them as they are.
    Raises:
        LoadError: If it is damaged or made for another target.
    """

    name = "eagle3"

    def __init__(
        self,
        hf: Mapping[str, Any],
        tensors: Tensors,
        source: str,
        target: FeatureTarget,
        dtype: mx.Dtype | None,
        quantize: int | None = None,
    ) -> None:
        tensors = canonical_names(tensors)
        layer = dict(hf.get("transformer_layer_config") or hf)
        is_normed = "layers.0.self_attn.q_norm.weight" in tensors
        layer["model_type"] = "qwen3" if is_normed else "llama"
        layer.setdefault("vocab_size", target.vocab_size)
        config = ModelConfig.from_hf(layer).replace(partial_rotary_factor=1.0)
        self.taps = _taps(hf, target.num_layers)
        self._eps = config.rms_norm_eps
        self._norm_before_residual = bool(hf.get("norm_before_residual", False))
        self._norm_output = bool(hf.get("norm_output", False))
        size, lent = config.hidden_size, target.hidden_size
        inputs = len(self.taps) * lent
        check_size(hf, "target_hidden_size", lent)
        check_size(hf, "vocab_size", target.vocab_size)
        weights = CheckpointWeights(tensors, source, dtype, quantize)
        self._fc = weights.linear("fc", size, inputs, False)
        self._input_norm = None
        if hf.get("norm_before_fc") or weights.has("input_norm.weight"):
            self._input_norm = weights.tensor("input_norm.weight", (inputs,))
        self._tap_norms: list[mx.array] = []
        if hf.get("fc_norm") or weights.has("fc_norm.0.weight"):
            self._tap_norms = [
                weights.tensor(f"fc_norm.{index}.weight", (lent,))
                for index in range(len(self.taps))
            ]
        self._embed = token_embedding(weights, lent, target)
        prefix = "layers.0"
        self._feature_norm = weights.tensor(f"{prefix}.hidden_norm.weight", (size,))
        self._embed_norm = weights.tensor(f"{prefix}.input_layernorm.weight", (lent,))
        self._attention = Attention(
            config, rope_of(config), weights, f"{prefix}.self_attn", size + lent
        )
        name = f"{prefix}.post_attention_layernorm.weight"
        self._mlp_norm = weights.tensor(name, (size,))
        width, bias = config.intermediate_size, config.mlp_bias
        self._mlp = DenseFeedForward(config, width, bias, weights, f"{prefix}.mlp")
        self._norm = weights.tensor("norm.weight", (size,))
        self._head = DraftHead(hf, size, weights, source, target)
        self.memory_plan = finished(weights, config, 1, self._norm.dtype)

    def features(self, features: Features) -> mx.array:
        """Fuse the tapped layers, (T, taps · H) to (T, H)."""
        taps = list(features.taps)
        if self._tap_norms:
            taps = [
                mx.fast.rms_norm(tap, norm, self._eps)
                for tap, norm in zip(taps, self._tap_norms, strict=True)
            ]
        fused = mx.concatenate(taps, axis=-1)
        if self._input_norm is not None:
            fused = mx.fast.rms_norm(fused, self._input_norm, self._eps)
        return self._fc(fused)

    def step(self, features: mx.array, tokens: mx.array, cache: KVCache) -> mx.array:
        """Run T rows, each a feature and the token behind it; return new features."""
        embedded = mx.fast.rms_norm(self._embed(tokens), self._embed_norm, self._eps)
        normed = mx.fast.rms_norm(features, self._feature_norm, self._eps)
        x = mx.concatenate([embedded, normed], axis=-1)[None]
        mask = attention_mask(len(features), cache.seq_len, None)
        h = (normed if self._norm_before_residual else features)[None]
        h = h + self._attention(x, cache, mask)
        h = h + self._mlp(mx.fast.rms_norm(h, self._mlp_norm, self._eps))
        return self._normed(h[0]) if self._norm_output else h[0]

    def logits(self, features: mx.array) -> mx.array:
        """Return logits (T, V) over the target's tokens; −inf for those it has not."""
        hidden = features if self._norm_output else self._normed(features)
        return self._head.widen(self._head(hidden))

    def _normed(self, features: mx.array) -> mx.array:
        return mx.fast.rms_norm(features, self._norm, self._eps)


def _taps(hf: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Layers whose output is fused; the packagings count them differently."""
    key = "eagle_aux_hidden_state_layer_ids"
    if "speculators_model_type" in hf:
        # There 0 is the embedding: the input of a layer, not its output.
        taps = [index - 1 for index in hf.get(key) or ()]
    else:
        taps = list((hf.get("eagle_config") or {}).get(key) or hf.get(key) or ())
    taps = taps or [1, num_layers // 2 - 1, num_layers - 4]
    check_taps(taps, num_layers)
    return tuple(taps)
