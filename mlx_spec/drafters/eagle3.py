"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one layer on fused target features."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlx_spec.attention import Attention, attention_mask
from mlx_spec.cache import KVCache
from mlx_spec.config import ModelConfig
from mlx_spec.decoder import rope_of
from mlx_spec.errors import LoadError
from mlx_spec.memory import MemoryPlan
from mlx_spec.moe import DenseFeedForward
from mlx_spec.target import Features, FeatureTarget
from mlx_spec.tensor_file import Tensors
from mlx_spec.weights import CheckpointWeights

_UNUSED = ("t2d", "rotary_emb.inv_freq", "verifier_")


class Eagle3Head:
    """The network of an EAGLE-3 checkpoint.

    Args:
        hf: Its config.json, in the original, the SpecForge or the speculators form.
        tensors: Its tensors.
        source: Its folder, for messages.
        target: Lends its embedding and, where the checkpoint has none, its head.
        dtype: Of the arithmetic; None keeps the checkpoint's.
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
    ) -> None:
        tensors = _canonical(tensors)
        layer = dict(hf.get("transformer_layer_config") or hf)
        is_normed = "layers.0.self_attn.q_norm.weight" in tensors
        layer["model_type"] = "qwen3" if is_normed else "llama"
        layer.setdefault("vocab_size", target.vocab_size)
        config = ModelConfig.from_hf(layer).replace(partial_rotary_factor=1.0)
        self.taps = _taps(hf, target.num_layers)
        self._eps = config.rms_norm_eps
        self._norm_before_residual = bool(hf.get("norm_before_residual", False))
        self._norm_output = bool(hf.get("norm_output", False))
        self._target = target
        size, inputs = config.hidden_size, len(self.taps) * target.hidden_size
        check_size(hf, "target_hidden_size", target.hidden_size)
        check_size(hf, "vocab_size", target.vocab_size)
        weights = CheckpointWeights(tensors, source, dtype)
        self._fc = weights.linear("fc", size, inputs, False)
        self._input_norm = None
        if "input_norm.weight" in tensors:
            self._input_norm = weights.tensor("input_norm.weight", (inputs,))
        self._embed = None
        if "embed_tokens.weight" in tensors:
            rows = target.vocab_size
            self._embed = weights.embedding("embed_tokens", rows, target.hidden_size)
        prefix = "layers.0"
        self._feature_norm = weights.tensor(f"{prefix}.hidden_norm.weight", (size,))
        self._embed_norm = weights.tensor(
            f"{prefix}.input_layernorm.weight", (target.hidden_size,)
        )
        self._attention = Attention(
            config,
            rope_of(config),
            weights,
            f"{prefix}.self_attn",
            size + target.hidden_size,
        )
        name = f"{prefix}.post_attention_layernorm.weight"
        self._mlp_norm = weights.tensor(name, (size,))
        width, bias = config.intermediate_size, config.mlp_bias
        self._mlp = DenseFeedForward(config, width, bias, weights, f"{prefix}.mlp")
        self._norm = weights.tensor("norm.weight", (size,))
        draft_vocab = hf.get("draft_vocab_size") or target.vocab_size
        self._head = None
        if "lm_head.weight" in tensors:
            self._head = weights.linear("lm_head", draft_vocab, size, False)
        elif draft_vocab != target.vocab_size or size != target.hidden_size:
            raise LoadError(
                f"{source} has no lm_head, and the target's does not fit it",
                "the checkpoint is incomplete",
            )
        self._place_of = self._places(weights, tensors, draft_vocab, target.vocab_size)
        weights.finish()
        pair = 2 * config.num_key_value_heads * config.head_dim * self._norm.itemsize
        weight_bytes = sum(array.nbytes for array in weights.arrays)
        self.memory_plan = MemoryPlan(None, weight_bytes, (pair,), (None,))
        mx.eval(weights.arrays)

    @staticmethod
    def _places(
        weights: CheckpointWeights, tensors: Tensors, draft_vocab: int, vocab_size: int
    ) -> mx.array | None:
        """For each token of the target its place in the draft vocabulary, or -1."""
        if "d2t" not in tensors:
            if draft_vocab != vocab_size:
                raise LoadError(
                    f"the draft vocabulary has {draft_vocab:,} tokens and no map (d2t) "
                    f"to the target's {vocab_size:,}",
                    "the checkpoint is incomplete",
                )
            return None
        places = mx.arange(draft_vocab)
        tokens = places + weights.tensor("d2t", (draft_vocab,)).astype(mx.int32)
        low, high = tokens.min().item(), tokens.max().item()
        if not 0 <= low <= high < vocab_size:  # type: ignore[operator]
            raise LoadError(
                f"d2t names the tokens {low} to {high}, the target has {vocab_size:,}",
                "use a drafter of the target's vocabulary",
            )
        return mx.full((vocab_size,), -1).at[tokens].add(places + 1)

    def features(self, features: Features) -> mx.array:
        """Fuse the tapped layers, (T, taps · H) to (T, H)."""
        taps = mx.concatenate(list(features.taps), axis=-1)
        if self._input_norm is not None:
            taps = mx.fast.rms_norm(taps, self._input_norm, self._eps)
        return self._fc(taps)

    def embeddings(self, tokens: mx.array) -> mx.array:
        """Return the input (T, H) for T tokens."""
        return (
            self._target.embed(tokens) if self._embed is None else self._embed(tokens)
        )

    def step(self, features: mx.array, tokens: mx.array, cache: KVCache) -> mx.array:
        """Run T rows, each a feature and the token behind it; return new features."""
        embedded = mx.fast.rms_norm(
            self.embeddings(tokens), self._embed_norm, self._eps
        )
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
        if self._head is None:
            return self._target.logits_of(hidden)
        logits = self._head(hidden)
        if self._place_of is None:
            return logits
        known = logits[:, mx.maximum(self._place_of, 0)]
        return mx.where(self._place_of >= 0, known, -mx.inf)

    def _normed(self, features: mx.array) -> mx.array:
        return mx.fast.rms_norm(features, self._norm, self._eps)


def _canonical(tensors: Tensors) -> Tensors:
    renamed = {
        name.removeprefix("model.").replace("midlayer.", "layers.0."): value
        for name, value in tensors.items()
    }
    return {
        name: value
        for name, value in renamed.items()
        if not any(part in name for part in _UNUSED)
    }


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


def check_taps(taps: list[int], num_layers: int) -> None:
    """Check that the target has the layers a drafter wants to see.

    Raises:
        LoadError: Naming those it has not.
    """
    if foreign := [tap for tap in taps if not 0 <= tap < num_layers]:
        raise LoadError(
            f"the drafter looks at layers {foreign}, the target has layers 0 to "
            f"{num_layers - 1}",
            "use a drafter that was made for this target",
        )


def check_size(hf: Mapping[str, Any], name: str, expected: int) -> None:
    """Check a size that config.json of a drafter may state.

    Raises:
        LoadError: Naming both values.
    """
    found = hf.get(name)
    if found is not None and found != expected:
        raise LoadError(
            f"the drafter has {name} {found:,}, the target {expected:,}",
            "use a drafter that was made for this target",
        )
