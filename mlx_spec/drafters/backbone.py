"""The block network of DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147).

The block [anchor, mask, …, mask] attends to itself in both directions and to context
rows made of tapped target layers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from mlx_spec.attention import Attention, Mask
from mlx_spec.cache import KVCache
from mlx_spec.config import ModelConfig
from mlx_spec.decoder import rope_of
from mlx_spec.drafters.convolution import BlockConv
from mlx_spec.drafters.parts import (
    DraftHead,
    canonical_names,
    check_size,
    check_taps,
    finished,
    needed,
    token_embedding,
)
from mlx_spec.errors import LoadError
from mlx_spec.memory import MemoryPlan
from mlx_spec.moe import DenseFeedForward
from mlx_spec.rope import Rope
from mlx_spec.target import Features, FeatureTarget
from mlx_spec.tensor_file import Tensors
from mlx_spec.weights import CheckpointWeights

_RENAMES = ((".attention_sink_bias", ".sinks"), ("logit_head.", "markov_head."))


def block_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a config.json of any packaging; taps are layers whose output is seen."""
    settings = dict(hf.get("transformer_layer_config") or {})
    settings |= {name: value for name, value in hf.items() if value is not None}
    settings |= hf.get("dflash_config") or {}
    if "speculators_model_type" in hf:
        # There 0 is the embedding: the input of a layer, not its output.
        taps = hf.get("aux_hidden_state_layer_ids") or ()
        settings["target_layer_ids"] = [index - 1 for index in taps]
    if settings.get("use_swa"):
        settings["sliding_window"] = needed(settings, "swa_window_size", "the drafter")
        every = ["sliding_attention"] * int(settings.get("num_hidden_layers") or 0)
        settings["layer_types"] = settings.get("layer_types") or every
    return settings


class Backbone:
    """The layers of a block drafter, with the embedding and the head at their ends.

    Args:
        settings: What ``block_settings`` made of its config.json.
        tensors: Its tensors.
        source: Its folder, for messages.
        target: Lends embedding and head where the checkpoint has none.
        dtype: Of the arithmetic; None keeps the checkpoint's.
        quantize: 4 or 8 to pack its matrices, None to leave them as they are.
    Raises:
        LoadError: If it is damaged or made for another target.

    Attributes:
        weights: Tensors that were not asked for yet; see ``finish``.
        hidden_size: Width H of its rows.
        block_size: Rows of a block, the anchor's included.
        taps: Layers of the target it looks at, 0-based.
        head: From rows to logits.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        tensors: Tensors,
        source: str,
        target: FeatureTarget,
        dtype: mx.Dtype | None,
        quantize: int | None,
    ) -> None:
        tensors = canonical_names(tensors, *_RENAMES)
        weights = CheckpointWeights(tensors, source, dtype, quantize)
        layer = {"vocab_size": target.vocab_size, **settings, "model_type": "qwen3"}
        config = ModelConfig.from_hf(layer)
        is_split = settings.get("is_neox_style", True)
        is_split = settings.get("rope_is_neox_style", is_split)
        config = config.replace(rope_traditional=not is_split)
        ends = ("embed_tokens.weight", "lm_head.weight")
        if not all(weights.has(name) for name in ends):
            check_size(settings, "hidden_size", target.hidden_size)
        check_size(settings, "target_hidden_size", target.hidden_size)
        check_size(settings, "vocab_size", target.vocab_size)
        check_size(settings, "num_target_layers", target.num_layers)
        self.weights = weights
        self.hidden_size = size = config.hidden_size
        self.block_size = needed(settings, "block_size", source)
        self.taps = _taps(settings, config.num_hidden_layers, target.num_layers)
        self._config = config
        self._eps = config.rms_norm_eps
        place = _mask_place(settings, size, weights, source, target)
        self._mask_token, self._mask_row = place
        inputs = len(self.taps) * target.hidden_size
        self._fc = weights.linear("fc", size, inputs, False)
        self._context_norm = weights.tensor("hidden_norm.weight", (size,))
        self._embed = token_embedding(weights, size, target)
        rope = rope_of(config)
        self._layers = [
            _Layer(config, index, rope, weights, settings)
            for index in range(config.num_hidden_layers)
        ]
        self._norm = weights.tensor("norm.weight", (size,))
        self.head = DraftHead(settings, size, weights, source, target)

    def finish(self) -> MemoryPlan:
        """Load all weights; return what they and the context rows need.

        Raises:
            LoadError: Naming tensors that nothing asked for.
        """
        num_layers, dtype = len(self._layers), self._norm.dtype
        return finished(self.weights, self._config, num_layers, dtype)

    def new_caches(self) -> list[KVCache]:
        """Return an empty cache of context rows for each layer."""
        return [KVCache() for _ in self._layers]

    def absorb(self, features: Features, caches: Sequence[KVCache]) -> None:
        """Append the context rows of T positions to each layer's cache."""
        rows = self._fc(mx.concatenate(list(features.taps), axis=-1))
        rows = mx.fast.rms_norm(rows, self._context_norm, self._eps)[None]
        for layer, cache in zip(self._layers, caches, strict=True):
            layer.absorb(rows, cache)

    def block(self, anchor: int, caches: Sequence[KVCache]) -> mx.array:
        """Run one block behind the context rows; return (block_size, H).

        A block that sees itself both ways is always run as wide as it was trained.
        """
        num_masks = self.block_size - 1
        tokens = [anchor] + [self._mask_token] * num_masks
        x = self._embed(mx.array(tokens, mx.int32))
        if self._mask_row is not None:
            x = mx.concatenate([x[:1], *[self._mask_row[None]] * num_masks])
        x = x[None]
        for layer, cache in zip(self._layers, caches, strict=True):
            x = layer(x, cache)
        return mx.fast.rms_norm(x[0], self._norm, self._eps)


class _Layer:
    def __init__(
        self,
        config: ModelConfig,
        index: int,
        rope: Rope,
        weights: CheckpointWeights,
        settings: Mapping[str, Any],
    ) -> None:
        prefix, size = f"layers.{index}", config.hidden_size
        self._eps = config.rms_norm_eps
        self._window = config.window_of(index)
        self._is_causal = _is_causal(settings, self._window)
        has_sinks = weights.has(f"{prefix}.self_attn.sinks")
        attending = config.replace(attention_sinks=has_sinks)
        self._attention = Attention(attending, rope, weights, f"{prefix}.self_attn")
        width, bias = config.intermediate_size, config.mlp_bias
        self._mlp = DenseFeedForward(config, width, bias, weights, f"{prefix}.mlp")
        self._norm = weights.tensor(f"{prefix}.input_layernorm.weight", (size,))
        name = f"{prefix}.post_attention_layernorm.weight"
        self._mlp_norm = weights.tensor(name, (size,))
        self._attention_conv = self._mlp_conv = None
        if taps := settings.get("conv_kernel_size"):
            name, group = f"{prefix}.attention_conv", settings["conv_group_size"]
            self._attention_conv = BlockConv(name, size, taps, group, weights)
            name = f"{prefix}.mlp_conv"
            self._mlp_conv = BlockConv(name, size, taps, group, weights)

    def absorb(self, rows: mx.array, cache: KVCache) -> None:
        cache.append(*self._attention.keys_and_values(rows, cache.seq_len))

    def __call__(self, x: mx.array, cache: KVCache) -> mx.array:
        z = mx.fast.rms_norm(x, self._norm, self._eps)
        if self._attention_conv is None or self._mlp_conv is None:
            x = x + self._attend(z, cache)
            return x + self._mlp(mx.fast.rms_norm(x, self._mlp_norm, self._eps))
        enter, leave = self._attention_conv.filters(z)
        x = x + leave(self._attend(enter(z), cache))
        z = mx.fast.rms_norm(x, self._mlp_norm, self._eps)
        enter, leave = self._mlp_conv.filters(z)
        return x + leave(self._mlp(enter(z)))

    def _attend(self, z: mx.array, cache: KVCache) -> mx.array:
        """Attend to the context rows and the block, whose rows are not kept."""
        start = cache.seq_len
        queries = self._attention.queries(z, start)
        keys, values = cache.append(*self._attention.keys_and_values(z, start))
        cache.truncate(start)
        return self._attention.mix(queries, keys, values, self._mask(z.shape[1], start))

    def _mask(self, size: int, start: int) -> Mask:
        if self._window is None and not self._is_causal:
            return None
        queries = mx.arange(start, start + size)[:, None]
        keys = mx.arange(start + size)[None]
        mask = mx.ones((size, start + size), mx.bool_)
        if self._is_causal:
            mask = mask & (keys <= queries)
        if self._window is not None:
            mask = mask & (queries < keys + self._window)
        return mask


def _is_causal(settings: Mapping[str, Any], window: int | None) -> bool:
    """Published rule: an explicit flag wins, else sliding layers are causal."""
    for name in ("is_causal", "causal", "dflash_query_causal"):
        if settings.get(name) is not None:
            return bool(settings[name])
    return window is not None and not settings.get("sliding_window_non_causal")


def _mask_place(
    settings: Mapping[str, Any],
    size: int,
    weights: CheckpointWeights,
    source: str,
    target: FeatureTarget,
) -> tuple[int, mx.array | None]:
    """The token of the places to fill, and the row stored in place of its embedding."""
    if weights.has("mask_embedding"):
        return 0, weights.tensor("mask_embedding", (size,))
    token = needed(settings, "mask_token_id", source)
    if not 0 <= token < target.vocab_size:
        raise LoadError(
            f"the drafter has mask_token_id {token:,}, the target has tokens 0 to "
            f"{target.vocab_size - 1:,}",
            "use a drafter of the target's vocabulary",
        )
    return token, None


def _taps(settings: Mapping[str, Any], depth: int, num_layers: int) -> tuple[int, ...]:
    taps = list(settings.get("target_layer_ids") or ())
    if not taps and depth == 1:
        taps = [num_layers // 2]
    if not taps:
        taps = [round(1 + i * (num_layers - 4) / (depth - 1)) for i in range(depth)]
    check_taps(taps, num_layers)
    return tuple(taps)
