"""Drafters that feed on their own output, one token after another: EAGLE-3 and MTP.

A head keeps one row for each position it has seen: the target's feature there, paired
with the embedding of the token behind it. While it drafts, its own output takes the
place of the feature; those rows are dropped again before the block is returned.
"""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from mlx_spec.cache import KVCache
from mlx_spec.draft import DraftBlock
from mlx_spec.drafters.committed import CommittedRows
from mlx_spec.drafters.sampler import DraftSampler
from mlx_spec.memory import MemoryPlan
from mlx_spec.sampling import SamplingParams
from mlx_spec.target import Features

_MANY = 64  # rows that are not left to wait for the next draft


class ChainHead(Protocol):
    """The network of such a drafter.

    Attributes:
        name: What it is called.
        taps: Layers of the target it wants to see, 0-based.
        memory_plan: What its weights and its cache need.
    """

    name: str
    taps: tuple[int, ...]
    memory_plan: MemoryPlan

    def features(self, features: Features) -> mx.array:
        """Return what stands for the target's rows, (T, H)."""
        ...

    def step(self, features: mx.array, tokens: mx.array, cache: KVCache) -> mx.array:
        """Run T rows, each a feature and the token behind it.

        Returns:
            What stands for a feature in the next step, (T, H).
        """
        ...

    def logits(self, features: mx.array) -> mx.array:
        """Return the logits (T, V) that belong to the output (T, H) of ``step``."""
        ...


class ChainDrafter:
    """Drafts with a head that feeds on its own output, in one graph a round.

    Args:
        head: The network.
        vocab_size: Number of tokens it can propose.
        max_draft_len: Tokens to propose at most.
    """

    lookback = 1

    def __init__(self, head: ChainHead, vocab_size: int, max_draft_len: int) -> None:
        self.name, self.taps = head.name, head.taps
        self._head = head
        self._max_draft_len = max_draft_len
        self._sampler = DraftSampler(vocab_size)
        self._rows = CommittedRows(lookahead=1)
        self._cache = KVCache()
        self._seed: mx.array | None = None  # the last row's output

    @property
    def memory_plan(self) -> MemoryPlan:
        """What the head and its cache need."""
        return self._head.memory_plan

    def follow(
        self, sampling: SamplingParams, seed: int, is_coupled: bool, vocab_size: int
    ) -> None:
        """Draw as the target does; see ``SamplingDrafter``."""
        self._sampler.follow(sampling, seed, is_coupled, vocab_size)

    def observe(self, history: Sequence[int], features: Features) -> None:
        """See the target's rows of committed positions."""
        self._rows.follow(history)
        self._rows.add(features)
        self._drop_stale()
        if self._rows.num_waiting >= _MANY:
            self._absorb(history)
            mx.async_eval(self._cache.state())

    def propose(
        self, history: Sequence[int], target_hidden: mx.array | None, max_len: int
    ) -> DraftBlock:
        """Draft up to ``max_len`` tokens in one graph."""
        self._rows.follow(history)
        self._drop_stale()
        self._absorb(history)
        count = min(max_len, self._max_draft_len)
        if self._seed is None or count <= 0 or not self._rows.is_in_step:
            return DraftBlock.empty()
        draft = self._sampler.begin(history)
        output = self._seed
        for index in range(count):
            if index:
                output = self._head.step(output, draft.last, self._cache)
            draft.draw(self._head.logits(output)[0])
        self._cache.truncate(len(self._rows))
        return draft.block()

    def _drop_stale(self) -> None:
        if len(self._rows) < self._cache.seq_len:
            self._cache.truncate(len(self._rows))
            self._seed = None

    def _absorb(self, history: Sequence[int]) -> None:
        """Run the rows that were seen since the last draft."""
        if (taken := self._rows.take()) is None:
            return
        positions, features = taken
        tokens = mx.array([history[p + 1] for p in positions], mx.int32)
        rows = self._head.features(features)
        self._seed = self._head.step(rows, tokens, self._cache)[-1:]
