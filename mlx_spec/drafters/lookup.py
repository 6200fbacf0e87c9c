"""Prompt lookup: propose what followed the last tokens the time before.

No weights, no memory to speak of; strong where the answer copies or edits the
prompt (Saxena 2023, "Prompt lookup decoding").
"""

from collections.abc import Sequence

import mlx.core as mx

from mlx_spec.draft import DraftBlock
from mlx_spec.drafters.followed import FollowedTokens
from mlx_spec.errors import SpecError


class PromptLookupDrafter:
    """Finds the latest earlier occurrence of the last n tokens.

    Args:
        ngram_size: Number of tokens to look for, n.
        max_draft_len: Tokens to propose at most.
        min_ngram_size: Where the last n do not occur earlier, try fewer, down to this;
            None looks for n only.
    """

    name = "lookup"

    def __init__(
        self,
        ngram_size: int = 3,
        max_draft_len: int = 10,
        min_ngram_size: int | None = None,
    ) -> None:
        smallest = ngram_size if min_ngram_size is None else min_ngram_size
        if not 1 <= smallest <= ngram_size:
            raise SpecError(
                f"n-grams of {smallest} to {ngram_size} tokens cannot be looked up",
                "use 1 <= min_ngram_size <= ngram_size",
            )
        self._max_draft_len = max_draft_len
        self._sizes = range(ngram_size, smallest - 1, -1)
        self._followed = FollowedTokens()
        self._indexed = 0
        # n-gram -> position behind its latest occurrence, the final one left out
        self._after: dict[tuple[int, ...], int] = {}

    def propose(
        self, history: Sequence[int], target_hidden: mx.array | None, max_len: int
    ) -> DraftBlock:
        """Propose what followed the longest n-gram that occurs earlier."""
        self._follow(history)
        tokens = self._followed.tokens
        length = len(tokens)
        limit = min(max_len, self._max_draft_len)
        for size in self._sizes:
            if size < length:
                begin = self._after.get(tuple(tokens[-size:]))
                if begin is not None:
                    found = tokens[begin : begin + limit]
                    return DraftBlock.deterministic(found)
        return DraftBlock.empty()

    def _follow(self, history: Sequence[int]) -> None:
        """Bring the index up to ``history``, at a cost of the tokens that are new."""
        shared = self._followed.follow(history)
        if shared < self._indexed:
            self._after, self._indexed = {}, 0
        for length in range(self._indexed, len(history)):
            self._index_end(length)
        self._indexed = len(history)

    def _index_end(self, length: int) -> None:
        """Enter the n-grams that end the first ``length`` tokens; another follows."""
        tokens = self._followed.tokens
        for size in self._sizes:
            if size <= length:
                self._after[tuple(tokens[length - size : length])] = length
