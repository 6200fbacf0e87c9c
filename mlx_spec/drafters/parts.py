"""What published drafters share: checks against the target, embedding, head, memory."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from mlx_spec.config import ModelConfig
from mlx_spec.errors import LoadError
from mlx_spec.memory import MemoryPlan
from mlx_spec.target import FeatureTarget
from mlx_spec.tensor_file import Tensors
from mlx_spec.weights import CheckpointWeights

_UNUSED = ("t2d", "rotary_emb.inv_freq", "verifier_")


def canonical_names(tensors: Tensors, *renames: tuple[str, str]) -> Tensors:
    """Give the tensors of all packagings one name, and drop those nobody reads."""
    renamed: Tensors = {}
    for name, value in tensors.items():
        name = name.removeprefix("model.")
        for published, canonical in (("midlayer.", "layers.0."), *renames):
            name = name.replace(published, canonical)
        renamed[name] = value
    return {
        name: value
        for name, value in renamed.items()
        if not any(part in name for part in _UNUSED)
    }


def check_taps(taps: Sequence[int], num_layers: int) -> None:
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


def needed(hf: Mapping[str, Any], name: str, source: str) -> int:
    """Return a number that config.json of a drafter must state.

    Raises:
        LoadError: If it does not.
    """
    value = hf.get(name)
    if not isinstance(value, int):
        raise LoadError(
            f"config.json of {source} has no {name!r}", "the checkpoint is incomplete"
        )
    return value


def token_embedding(
    weights: CheckpointWeights, width: int, target: FeatureTarget
) -> Callable[[mx.array], mx.array]:
    """Return the drafter's own embedding, or else the target's: (T,) to (T, width)."""
    if not weights.has("embed_tokens.weight"):
        return target.embed
    return weights.embedding("embed_tokens", target.vocab_size, width)


class DraftHead:
    """From hidden states to logits, maybe over fewer tokens than the target has.

    Args:
        hf: config.json of the drafter, which may state ``draft_vocab_size``.
        size: Width of its hidden states.
        weights: Its tensors: ``lm_head`` if it has a head of its own, and for each
            token of a reduced vocabulary its distance to the target's (``d2t``).
        source: Its folder, for messages.
        target: Lends its head where there is no other.
    Raises:
        LoadError: If the head or the vocabulary do not fit the target.
    """

    def __init__(
        self,
        hf: Mapping[str, Any],
        size: int,
        weights: CheckpointWeights,
        source: str,
        target: FeatureTarget,
    ) -> None:
        vocab_size = target.vocab_size
        self.num_tokens: int = hf.get("draft_vocab_size") or vocab_size
        self._places = _places(weights, self.num_tokens, vocab_size)
        self._project: Callable[[mx.array], mx.array] = target.logits_of
        if weights.has("lm_head.weight"):
            self._project = weights.linear("lm_head", self.num_tokens, size, False)
        elif self.num_tokens != vocab_size or size != target.hidden_size:
            raise LoadError(
                f"{source} has no lm_head, and the target's does not fit it",
                "the checkpoint is incomplete",
            )

    def __call__(self, hidden: mx.array) -> mx.array:
        """Return logits (T, num_tokens) of hidden states (T, size)."""
        return self._project(hidden)

    def widen(self, logits: mx.array) -> mx.array:
        """Return logits (…, V) over the target's tokens; −inf for those it has not."""
        if self._places is None:
            return logits
        known = mx.take(logits, mx.maximum(self._places, 0), axis=-1)
        return mx.where(self._places >= 0, known, -mx.inf)


def _places(
    weights: CheckpointWeights, num_tokens: int, vocab_size: int
) -> mx.array | None:
    """For each token of the target its place in the draft vocabulary, or -1."""
    if not weights.has("d2t"):
        if num_tokens != vocab_size:
            raise LoadError(
                f"the draft vocabulary has {num_tokens:,} tokens and no map (d2t) "
                f"to the target's {vocab_size:,}",
                "the checkpoint is incomplete",
            )
        return None
    places = mx.arange(num_tokens)
    tokens = places + weights.tensor("d2t", (num_tokens,)).astype(mx.int32)
    low, high = tokens.min().item(), tokens.max().item()
    if not 0 <= low <= high < vocab_size:  # type: ignore[operator]
        raise LoadError(
            f"d2t names the tokens {low} to {high}, the target has {vocab_size:,}",
            "use a drafter of the target's vocabulary",
        )
    return mx.full((vocab_size,), -1).at[tokens].add(places + 1)


def finished(
    weights: CheckpointWeights, config: ModelConfig, num_layers: int, dtype: mx.Dtype
) -> MemoryPlan:
    """Check that no tensor is left, load all, and return what they need.

    Args:
        weights: The tensors, all asked for.
        config: Of the drafter's layers.
        num_layers: Layers that keep keys and values.
        dtype: Of the keys and values.
    Raises:
        LoadError: Naming tensors that nothing asked for.
    """
    weights.finish()
    pair = 2 * config.num_key_value_heads * config.head_dim * dtype.size
    weight_bytes = sum(array.nbytes for array in weights.arrays)
    mx.eval(weights.arrays)
    return MemoryPlan(None, weight_bytes, (pair,) * num_layers, (None,) * num_layers)
