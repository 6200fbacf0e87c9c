"""Multi-token prediction: the extra layer that some targets are published with.

DeepSeek-V3 (arXiv 2412.19437), GLM-4.5 and their relatives store it as layer number
``num_hidden_layers``. It runs the target's own kind of layer on the target's final
hidden state at a position, paired with the token behind it.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlx_spec.attention import attention_mask
from mlx_spec.cache import KVCache
from mlx_spec.config import ModelConfig
from mlx_spec.decoder import DecoderLayer, rope_of
from mlx_spec.drafters.parts import finished
from mlx_spec.errors import LoadError
from mlx_spec.families import family_of
from mlx_spec.target import Features, FeatureTarget
from mlx_spec.tensor_file import Tensors
from mlx_spec.weights import CheckpointWeights, canonical_tensors


class MTPHead:
    """The network of a multi-token prediction layer.

    Args:
        hf: The target's config.json.
        tensors: The tensors of the checkpoint the layer is in.
        source: Its folder, for messages.
        target: Lends its embedding and, where the layer has none, its head.
        dtype: Of the arithmetic; None keeps the checkpoint's.
        quantize: 4 or 8 to pack its matrices, None to leave them as they are.
    Raises:
        LoadError: If the checkpoint has no such layer, or a part of it is missing.
    """

    name = "mtp"
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        hf: Mapping[str, Any],
        tensors: Tensors,
        source: str,
        target: FeatureTarget,
        dtype: mx.Dtype | None,
        quantize: int | None = None,
    ) -> None:
        config = ModelConfig.from_hf(hf)
        index = config.num_hidden_layers
        prefix = f"model.layers.{index}"
        own = {k: v for k, v in tensors.items() if k.startswith(f"{prefix}.")}
        if not own:
            raise LoadError(
                f"{source} has no multi-token prediction layer ({prefix})",
                "most converted checkpoints leave it out; use another drafter",
            )
        own = canonical_tensors(own, family_of(hf), index + 1)
        # The embedding is a copy of the target's; the head is one as a rule.
        own = _without(own, f"{prefix}.embed_tokens")
        head = f"{prefix}.shared_head.head"
        if _has_copy(own, head, tensors, "lm_head"):
            own = _without(own, head)
        self._target = target
        self._eps = config.rms_norm_eps
        size = config.hidden_size
        weights = CheckpointWeights(own, source, dtype, quantize)
        self._embed_norm = weights.tensor(f"{prefix}.enorm.weight", (size,))
        self._hidden_norm = weights.tensor(f"{prefix}.hnorm.weight", (size,))
        self._fuse = weights.linear(f"{prefix}.eh_proj", size, 2 * size, False)
        self._layer = DecoderLayer(config, index, rope_of(config), weights)
        self._norm = weights.tensor(f"{prefix}.shared_head.norm.weight", (size,))
        self._head = None
        if weights.has(f"{head}.weight"):
            self._head = weights.linear(head, config.vocab_size, size, False)
        self.memory_plan = finished(weights, config, 1, self._norm.dtype)

    def features(self, features: Features) -> mx.array:
        """Return the target's final hidden states (T, H)."""
        return features.hidden

    def step(self, features: mx.array, tokens: mx.array, cache: KVCache) -> mx.array:
        """Run T rows, each a feature and the token behind it; return new features."""
        embedded = mx.fast.rms_norm(
            self._target.embed(tokens), self._embed_norm, self._eps
        )
        hidden = mx.fast.rms_norm(features, self._hidden_norm, self._eps)
        x = self._fuse(mx.concatenate([embedded, hidden], axis=-1))
        mask = attention_mask(len(features), cache.seq_len, None)
        return self._layer(x[None], cache, mask)[0]

    def logits(self, features: mx.array) -> mx.array:
        """Return the logits (T, V)."""
        hidden = mx.fast.rms_norm(features, self._norm, self._eps)
        if self._head is None:
            return self._target.logits_of(hidden)
        return self._head(hidden)


def _without(tensors: Tensors, module: str) -> Tensors:
    return {k: v for k, v in tensors.items() if not k.startswith(f"{module}.")}


def _has_copy(own: Tensors, module: str, tensors: Tensors, original: str) -> bool:
    """Whether a matrix, plain or packed, has the values of another one."""
    parts = [k.removeprefix(module) for k in own if k.startswith(f"{module}.")]
    return all(
        original + part in tensors
        and mx.array_equal(own[module + part], tensors[original + part]).item()
        for part in parts
    )
