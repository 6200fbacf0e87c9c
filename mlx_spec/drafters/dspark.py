"""DSpark (arXiv 2607.05147): a block whose tokens depend on those drafted before.

A low-rank Markov head corrects each row of the block by the token that was drawn from
the row before it. What the checkpoints call a confidence head, an estimate of
acceptance, is not read: to shorten a block by it, each round would have to wait for
the device before it verifies.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from mlx_spec.cache import KVCache
from mlx_spec.drafters.backbone import Backbone, block_settings
from mlx_spec.drafters.parts import needed
from mlx_spec.drafters.sampler import Draft
from mlx_spec.errors import LoadError
from mlx_spec.layers import Linear
from mlx_spec.target import Features, FeatureTarget
from mlx_spec.tensor_file import Tensors
from mlx_spec.weights import Weights


class DSparkNetwork:
    """The network of a DSpark checkpoint.

    Args:
        hf: Its config.json, in the DeepSpec, the SpecForge or the speculators form.
        tensors: Its tensors.
        source: Its folder, for messages.
        target: Lends embedding and head where the checkpoint has none.
        dtype: Of the arithmetic; None keeps the checkpoint's.
        quantize: 4 or 8 to pack its matrices, None to leave them as they are.
    Raises:
        LoadError: If it is damaged or made for another target.
    """

    name = "dspark"

    def __init__(
        self,
        hf: Mapping[str, Any],
        tensors: Tensors,
        source: str,
        target: FeatureTarget,
        dtype: mx.Dtype | None,
        quantize: int | None = None,
    ) -> None:
        settings = block_settings(hf)
        tensors = {k: v for k, v in tensors.items() if "confidence_head." not in k}
        backbone = Backbone(settings, tensors, source, target, dtype, quantize)
        self._backbone = backbone
        self.taps = backbone.taps
        self._first = _first_row(settings, backbone.block_size)
        self.max_draft_len = backbone.block_size - self._first
        self._cap = settings.get("final_logit_softcapping")
        self._markov = _MarkovHead(
            str(settings.get("markov_head_type") or "vanilla"),
            needed(settings, "markov_rank", source),
            backbone.hidden_size,
            (target.vocab_size, backbone.head.num_tokens),
            backbone.weights,
        )
        self.memory_plan = backbone.finish()

    def new_caches(self) -> list[KVCache]:
        """Return an empty cache of context rows for each layer."""
        return self._backbone.new_caches()

    def absorb(self, features: Features, caches: Sequence[KVCache]) -> None:
        """Append the context rows of T positions to each layer's cache."""
        self._backbone.absorb(features, caches)

    def fill(
        self, draft: Draft, anchor: int, count: int, caches: Sequence[KVCache]
    ) -> None:
        """Draw the ``count`` tokens behind the anchor, from left to right."""
        head, first = self._backbone.head, self._first
        rows = self._backbone.block(anchor, caches)[first : first + count]
        logits = head(rows).astype(mx.float32)
        if self._cap:
            logits = mx.tanh(logits / self._cap) * self._cap
        previous = mx.array([anchor], mx.int32)
        state = self._markov.start()
        for index in range(count):
            bias, state = self._markov(rows[index], previous, state)
            previous = draft.draw(head.widen(logits[index] + bias))


class _MarkovHead:
    """What the token before it adds to the logits of a row, at a low rank.

    Args:
        kind: ``vanilla``, ``gated`` (by the row) or ``rnn`` (with a state).
        rank: Width r of the embedding of the token before.
        size: Width H of a row.
        vocab: Number of tokens before, and of tokens behind them.
        weights: The tensors of the checkpoint.
    """

    def __init__(
        self, kind: str, rank: int, size: int, vocab: tuple[int, int], weights: Weights
    ) -> None:
        name = "markov_head"
        self._rank = rank
        self._before = weights.tensor(f"{name}.markov_w1.weight", (vocab[0], rank))
        self._after = Linear(
            weights.tensor(f"{name}.markov_w2.weight", (vocab[1], rank))
        )
        self._kind = kind
        match kind:
            case "vanilla":
                return
            case "gated":
                self._gate = _plain(f"{name}.gate_proj", rank, size + rank, weights)
            case "rnn":
                width = 2 * rank + size
                self._joint = _plain(f"{name}.joint_proj", 3 * rank, width, weights)
            case _:
                raise LoadError(
                    f"markov_head_type {kind!r} is not supported",
                    "supported: vanilla, gated, rnn",
                )

    def start(self) -> mx.array:
        """Return the state (r,) before the first row."""
        return mx.zeros((self._rank,), self._before.dtype)

    def __call__(
        self, row: mx.array, previous: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Return the bias of a row's logits, float32, and the next state.

        Args:
            row: (H,) of the block.
            previous: (1,) int32, the token drafted before it.
            state: (r,).
        """
        mixed = before = self._before[previous][0]
        match self._kind:
            case "gated":
                mixed = mx.sigmoid(self._gate(mx.concatenate([row, before]))) * before
            case "rnn":
                joint = self._joint(mx.concatenate([state, before, row]))
                keep, new, out = mx.split(joint, 3)
                keep = mx.sigmoid(keep)
                state = keep * state + (1 - keep) * mx.tanh(new)
                mixed = mx.tanh(out)
        return self._after(mixed).astype(mx.float32), state


def _plain(name: str, out: int, width: int, weights: Weights) -> Linear:
    """A map that stays as it is where others are packed."""
    matrix = weights.tensor(f"{name}.weight", (out, width))
    return Linear(matrix, weights.tensor(f"{name}.bias", (out,)))


def _first_row(settings: Mapping[str, Any], block_size: int) -> int:
    """The row the first token is drawn from: the anchor's, or the one behind it."""
    methods = (settings.get("speculators_config") or {}).get("proposal_methods") or [{}]
    count = methods[0].get("speculative_tokens")
    if count is not None and block_size - count in (0, 1):
        return block_size - int(count)
    return 0 if settings.get("sample_from_anchor", True) else 1
