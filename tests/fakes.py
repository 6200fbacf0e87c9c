"""Small targets and drafters whose behaviour is known."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_spec import (
    Decoder,
    DraftBlock,
    DraftDist,
    ModelCache,
    ModelConfig,
    Sampler,
)
from mlx_spec.memory import MemoryPlan
from mlx_spec.target import Tokens

TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


def tiny_config(vocab_size: int = 50) -> ModelConfig:
    """The glm-5.2 preset, shrunk until a forward takes a millisecond."""
    return ModelConfig.preset("glm-5.2").replace(vocab_size=vocab_size, **TINY)


def tiny_decoder(vocab_size: int = 50, seed: int = 1) -> Decoder:
    """A random decoder of that shape."""
    return Decoder.random(tiny_config(vocab_size), seed)


class CountingTarget:
    """A target that counts its forward calls and their widths."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.widths: list[int] = []

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    @property
    def max_context(self) -> int | None:
        return self.decoder.max_context

    @property
    def memory_plan(self) -> MemoryPlan:
        return self.decoder.memory_plan

    def new_cache(self) -> ModelCache:
        return self.decoder.new_cache()

    def prefill(
        self, tokens: Tokens, start_pos: int, cache: ModelCache, step: int = 2048
    ) -> tuple[mx.array, mx.array]:
        self.widths.append(len(tokens))
        return self.decoder.prefill(tokens, start_pos, cache, step)

    def forward_batch_with_hidden(
        self, tokens: Tokens, start_pos: int, cache: ModelCache
    ) -> tuple[mx.array, mx.array]:
        self.widths.append(len(tokens))
        return self.decoder.forward_batch_with_hidden(tokens, start_pos, cache)


class RecordingDrafter:
    """Proposes what a function says, and remembers what it was given."""

    def __init__(self, script: Sequence[Sequence[int]] = ()) -> None:
        self._script = list(script)
        self.histories: list[list[int]] = []
        self.hiddens: list[mx.array | None] = []
        self.budgets: list[int] = []

    def propose(
        self, history: Sequence[int], target_hidden: mx.array | None, max_len: int
    ) -> DraftBlock:
        self.histories.append(list(history))
        self.hiddens.append(target_hidden)
        self.budgets.append(max_len)
        tokens = self._script.pop(0) if self._script else []
        return DraftBlock.deterministic(tokens[:max_len])


class OracleDrafter:
    """Knows the continuation; gets the drafts at chosen places wrong."""

    def __init__(
        self,
        sequence: Sequence[int],
        lengths: Sequence[int],
        wrong_at: frozenset[int] = frozenset(),
        vocab_size: int = 50,
    ) -> None:
        self._sequence = list(sequence)
        self._lengths = list(lengths)
        self._wrong_at = wrong_at
        self._vocab_size = vocab_size
        self._round = 0

    def propose(
        self, history: Sequence[int], target_hidden: mx.array | None, max_len: int
    ) -> DraftBlock:
        length = self._lengths[self._round % len(self._lengths)]
        self._round += 1
        begin = len(history)
        tokens = [
            (token + 1) % self._vocab_size if begin + i in self._wrong_at else token
            for i, token in enumerate(self._sequence[begin : begin + length])
        ]
        return DraftBlock.deterministic(tokens[:max_len])


class BadSoftmaxDrafter:
    """Draws from its own distribution, which has little to do with the target's."""

    def __init__(self, vocab_size: int, length: int, seed: int = 0) -> None:
        table = np.random.default_rng(7).normal(size=(vocab_size, vocab_size)) * 2
        exp = np.exp(table - table.max(axis=1, keepdims=True))
        self._q = exp / exp.sum(axis=1, keepdims=True)
        self._length = length
        self._rng = Sampler(seed)

    def propose(
        self, history: Sequence[int], target_hidden: mx.array | None, max_len: int
    ) -> DraftBlock:
        tokens: list[int] = []
        dists: list[DraftDist] = []
        last = history[-1]
        for _ in range(min(self._length, max_len)):
            row = self._q[last]
            last = self._rng.sample_from(row)
            tokens.append(last)
            dists.append(DraftDist.from_dense(row))
        return DraftBlock.new(tokens, dists)


class Pair:
    """A decoder as a draft model without a tokenizer."""

    tokenizer = None

    def __init__(self, target: Decoder) -> None:
        self.target = target
