"""A smaller model of the same vocabulary as the drafter."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import mlx.core as mx

from mlx_spec.cache import common_length
from mlx_spec.draft import DraftBlock
from mlx_spec.drafters.sampler import DraftSampler
from mlx_spec.errors import LoadError
from mlx_spec.memory import MemoryPlan
from mlx_spec.sampling import SamplingParams
from mlx_spec.target import Target


class Vocabulary(Protocol):
    """The part of a tokenizer that decides whether two models speak one language."""

    def get_vocab(self) -> Mapping[str, int]:
        """Return every token's id."""
        ...


class DraftModel(Protocol):
    """A loaded model: its decoder and its tokenizer."""

    @property
    def target(self) -> Target:
        """The model itself."""
        ...

    @property
    def tokenizer(self) -> Vocabulary | None:
        """Its tokenizer; None leaves the vocabulary unchecked."""
        ...


class DraftModelDrafter:
    """Drafts with a smaller model, one forward pass a token, without waiting.

    Args:
        target_tokenizer: The target's tokenizer; None leaves the pair unchecked.
        draft: The draft model.
        max_draft_len: Tokens to propose at most.
    Raises:
        LoadError: If the two vocabularies differ.
    """

    name = "model"

    def __init__(
        self,
        target_tokenizer: Vocabulary | None,
        draft: DraftModel,
        max_draft_len: int = 4,
    ) -> None:
        self._shared_size = draft.target.vocab_size
        if target_tokenizer is not None and draft.tokenizer is not None:
            shared = check_vocabularies(target_tokenizer, draft.tokenizer)
            self._shared_size = min(shared, self._shared_size)
        self._model = draft.target
        self._cache = self._model.new_cache()
        self._max_draft_len = max_draft_len
        self._sampler = DraftSampler(self._shared_size)
        # The cache holds the rows of these tokens, then of the block's but its last.
        self._known: list[int] = []
        self._block = DraftBlock.empty()

    @property
    def memory_plan(self) -> MemoryPlan:
        """What the draft model and its cache need."""
        return self._model.memory_plan

    def follow(
        self, sampling: SamplingParams, seed: int, is_coupled: bool, vocab_size: int
    ) -> None:
        """Draw as the target does; with its own noise if ``is_coupled``."""
        self._sampler.follow(sampling, seed, is_coupled, vocab_size)

    def propose(
        self, history: Sequence[int], target_hidden: mx.array | None, max_len: int
    ) -> DraftBlock:
        """Draft up to ``max_len`` tokens in one graph."""
        count = min(max_len, self._max_draft_len)
        if self._model.max_context is not None:
            count = min(count, self._model.max_context - len(history))
        if count <= 0:
            return DraftBlock.empty()
        self._roll_back(history)
        fresh = history[self._cache.seq_len :]
        if max(fresh) >= self._model.vocab_size:
            return DraftBlock.empty()  # it has no embedding for what the target wrote
        # Noted before anything runs: a pass that is cut short leaves no other rows.
        self._known, self._block = list(history), DraftBlock.empty()
        row, _ = self._model.prefill(fresh, self._cache.seq_len, self._cache)
        draft = self._sampler.begin(history)
        for index in range(count):
            if index:
                row = self._model.forward_batch_with_hidden(
                    draft.last, self._cache.seq_len, self._cache
                )[0][0]
            draft.draw(row)
        self._block = draft.block()
        return self._block

    def _roll_back(self, history: Sequence[int]) -> None:
        """Keep the rows of tokens that are in ``history``, all but its last.

        The last one is run again in any case: its row gives the first draft.
        """
        cached = [*self._known, *self._block.tokens][: self._cache.shortest]
        self._cache.rewind(min(common_length(cached, history), len(history) - 1))


def check_vocabularies(target: Vocabulary, draft: Vocabulary) -> int:
    """Return the number of ids that two tokenizers share.

    Padding of the embeddings may differ; the tokens themselves may not.

    Raises:
        LoadError: If some token has another id in the other vocabulary.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    different = [
        token for token, index in theirs.items() if ours.get(token) != index
    ] + [token for token in ours if token not in theirs]
    if different:
        token = min(different)
        raise LoadError(
            f"draft model and target do not share a vocabulary: {len(different):,} "
            f"tokens differ, for example {token!r} is {ours.get(token)} in the target "
            f"and {theirs.get(token)} in the draft model",
            "choose a draft model of the same family",
        )
    return max(ours.values(), default=-1) + 1
