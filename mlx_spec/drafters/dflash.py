"""DFlash (arXiv 2602.06036): a whole block in one pass; and its second version.

DFlash 2 adds a two-tap convolution around every sublayer, and a selector that makes
each token depend on the one before it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from mlx_spec.cache import KVCache
from mlx_spec.drafters.backbone import Backbone, block_settings
from mlx_spec.drafters.parts import needed
from mlx_spec.drafters.sampler import Draft
from mlx_spec.layers import Linear
from mlx_spec.target import Features, FeatureTarget
from mlx_spec.tensor_file import Tensors
from mlx_spec.weights import Weights

_SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


class DFlashNetwork:
    """The network of a DFlash checkpoint, first or second version.

    Args:
        hf: Its config.json, in the original or the speculators form.
        tensors: Its tensors.
        source: Its folder, for messages.
        target: Lends embedding and head where the checkpoint has none.
        dtype: Of the arithmetic; None keeps the checkpoint's.
        quantize: 4 or 8 to pack its matrices, None to leave them as they are.
    Raises:
        LoadError: If it is damaged or made for another target.
    """

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
        is_second = "dflash2" in " ".join(hf.get("architectures") or ()).lower()
        if is_second:
            for name in _SECOND:
                needed(settings, name, source)
        self._backbone = Backbone(settings, tensors, source, target, dtype, quantize)
        self.name = "dflash2" if settings.get("conv_kernel_size") else "dflash"
        self.taps = self._backbone.taps
        # Each row is for the token at its own place; the anchor's predicts nothing.
        self.max_draft_len = self._backbone.block_size - 1
        self._selector = None
        if settings.get("selector_rank"):
            size, weights = self._backbone.hidden_size, self._backbone.weights
            self._selector = _Selector(settings, size, target.vocab_size, weights)
        self.memory_plan = self._backbone.finish()

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
        rows = self._backbone.block(anchor, caches)[1 : count + 1]
        head = self._backbone.head
        logits = head.widen(head(rows))
        previous = mx.array([anchor], mx.int32)
        for index in range(count):
            scores = logits[index]
            if self._selector is not None:
                scores = self._selector(rows[index], scores, previous)
            previous = draft.draw(scores)


class _Selector:
    """Scores the likeliest tokens of a row by the token drafted before them."""

    def __init__(
        self, settings: Mapping[str, Any], size: int, vocab: int, weights: Weights
    ) -> None:
        rank = settings["selector_rank"]
        self._count: int = min(settings.get("selector_top_k") or 16, vocab)
        self._scale = float(settings.get("output_multiplier") or 1.0)
        self._cap = settings.get("final_logit_softcapping")
        name = "candidate_selector"
        self._before = weights.tensor(f"{name}.predecessor_codebook", (vocab, rank))
        self._after = weights.tensor(f"{name}.successor_codebook", (vocab, rank))
        projection = weights.tensor(f"{name}.hidden_projection.weight", (rank, size))
        self._project = Linear(projection)

    def __call__(self, row: mx.array, logits: mx.array, previous: mx.array) -> mx.array:
        """Return logits (V,): −inf but for the candidates.

        Args:
            row: (H,) of the block.
            logits: (V,), the row's own.
            previous: (1,) int32, the token drafted before it.
        """
        logits = logits.astype(mx.float32)
        top = mx.argpartition(-logits, kth=self._count - 1)[: self._count]
        unary = logits[top] * self._scale
        if self._cap:
            unary = mx.tanh(unary / self._cap) * self._cap
        gated = self._before[previous][0] * self._project(row[None])[0]
        scores = unary + (self._after[top] @ gated).astype(mx.float32)
        return mx.put_along_axis(mx.full(logits.shape, -mx.inf), top, scores, axis=0)
