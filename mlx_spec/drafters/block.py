"""Drafters that fill a whole block in one pass: DFlash and DSpark."""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from mlx_spec.cache import KVCache
from mlx_spec.draft import DraftBlock
from mlx_spec.drafters.committed import CommittedRows
from mlx_spec.drafters.sampler import Draft, DraftSampler
from mlx_spec.memory import MemoryPlan
from mlx_spec.sampling import SamplingParams
from mlx_spec.target import Features

_MANY = 64  # rows that are not left to wait for the next draft


class BlockNetwork(Protocol):
    """The network of such a drafter.

    Attributes:
        name: What it is called.
        taps: Layers of the target it wants to see, 0-based.
        max_draft_len: Tokens that one block has room for.
        memory_plan: What its weights and its context rows need.
    """

    name: str
    taps: tuple[int, ...]
    max_draft_len: int
    memory_plan: MemoryPlan

    def new_caches(self) -> list[KVCache]:
        """Return an empty cache of context rows for each layer."""
        ...

    def absorb(self, features: Features, caches: Sequence[KVCache]) -> None:
        """Append the context rows of T positions to each layer's cache."""
        ...

    def fill(
        self, draft: Draft, anchor: int, count: int, caches: Sequence[KVCache]
    ) -> None:
        """Draw the ``count`` tokens behind the anchor, from left to right."""
        ...


class BlockDrafter:
    """Drafts a block in one pass of a network, in one graph a round.

    Args:
        network: The network.
        vocab_size: Number of tokens it can propose.
        max_draft_len: Tokens to propose at most; None for the block's own.
    """

    lookback = 0

    def __init__(
        self, network: BlockNetwork, vocab_size: int, max_draft_len: int | None = None
    ) -> None:
        self.name, self.taps = network.name, network.taps
        self._network = network
        own = network.max_draft_len
        self._max_draft_len = min(max_draft_len or own, own)
        self._sampler = DraftSampler(vocab_size)
        self._rows = CommittedRows(lookahead=0)
        self._caches = network.new_caches()

    @property
    def memory_plan(self) -> MemoryPlan:
        """What the network and its context rows need."""
        return self._network.memory_plan

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
            self._absorb()
            mx.async_eval([cache.state() for cache in self._caches])

    def propose(
        self, history: Sequence[int], target_hidden: mx.array | None, max_len: int
    ) -> DraftBlock:
        """Draft up to ``max_len`` tokens in one graph."""
        self._rows.follow(history)
        self._drop_stale()
        self._absorb()
        count = min(max_len, self._max_draft_len)
        if count <= 0 or not self._rows.is_in_step:
            return DraftBlock.empty()
        draft = self._sampler.begin(history)
        self._network.fill(draft, history[-1], count, self._caches)
        return draft.block()

    def _drop_stale(self) -> None:
        for cache in self._caches:
            cache.truncate(min(len(self._rows), cache.seq_len))

    def _absorb(self) -> None:
        if (taken := self._rows.take()) is not None:
            self._network.absorb(taken[1], self._caches)
