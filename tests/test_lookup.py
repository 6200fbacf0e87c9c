"""Prompt lookup: the seed rule, and its cost."""

import pytest

from mlx_spec import DraftBlock, PromptLookupDrafter
from mlx_spec.errors import SpecError


def propose(drafter: PromptLookupDrafter, history: list[int], n: int) -> list[int]:
    return drafter.propose(history, None, n).tokens


def test_lookup_finds_the_continuation_after_a_repeat() -> None:
    history = [1, 2, 3, 4, 5, 9, 9, 9, 1, 2]
    assert propose(PromptLookupDrafter(2, 4), history, 4) == [3, 4, 5, 9]


def test_lookup_respects_its_maximum() -> None:
    history = [1, 2, 3, 4, 5, 9, 9, 9, 1, 2]
    assert propose(PromptLookupDrafter(2, 2), history, 10) == [3, 4]


def test_lookup_is_capped_by_the_callers_budget() -> None:
    history = [1, 2, 3, 4, 5, 9, 9, 9, 1, 2]
    assert propose(PromptLookupDrafter(2, 10), history, 3) == [3, 4, 5]


def test_lookup_proposes_nothing_without_an_earlier_match() -> None:
    assert propose(PromptLookupDrafter(2, 4), [1, 2, 3, 4, 5], 4) == []


def test_lookup_proposes_nothing_on_too_short_a_history() -> None:
    drafter = PromptLookupDrafter(2, 4)
    assert [propose(drafter, h, 4) for h in ([], [1], [1, 1])] == [[], [], []]


def test_lookup_lets_the_most_recent_match_win() -> None:
    history = [9, 8, 7, 6, 9, 5, 4, 9]
    assert propose(PromptLookupDrafter(1, 10), history, 10) == [5, 4, 9]


def test_lookup_tries_the_longest_match_first() -> None:
    history = [1, 2, 3, 7, 0, 2, 3, 8, 1, 2, 3]
    assert propose(PromptLookupDrafter(2, 1), history, 1) == [8]
    assert propose(PromptLookupDrafter(3, 1, 1), history, 1) == [7]


def test_lookup_falls_back_to_shorter_matches() -> None:
    history = [5, 6, 7, 0, 6]
    assert propose(PromptLookupDrafter(3, 2), history, 2) == []
    assert propose(PromptLookupDrafter(3, 2, 1), history, 2) == [7, 0]


def test_lookup_draws_nothing_by_chance() -> None:
    block = PromptLookupDrafter(1, 3).propose([4, 5, 4], None, 3)
    assert isinstance(block, DraftBlock)
    assert [dist.support for dist in block.dists] == [((5, 1.0),), ((4, 1.0),)]


def test_lookup_index_equals_a_scan_after_any_edit() -> None:
    histories = [
        [1, 2, 3, 1, 2],
        [1, 2, 3, 1, 2, 9, 1, 2],
        [1, 2, 4, 1, 2],  # an edited turn
        [2],
        [1, 2, 3, 1, 2, 9, 1, 2],
    ]
    drafter = PromptLookupDrafter(2, 3)
    for history in histories:
        fresh = propose(PromptLookupDrafter(2, 3), history, 3)
        assert propose(drafter, history, 3) == fresh


def test_lookup_follows_a_list_that_was_edited_in_place() -> None:
    history = [1, 2, 3, 1, 2]
    drafter = PromptLookupDrafter(2, 3)
    propose(drafter, history, 3)
    history[2:] = [7, 1, 2, 8, 1, 2]
    assert propose(drafter, history, 3) == propose(
        PromptLookupDrafter(2, 3), history, 3
    )


class CountingList(list[int]):
    """A list that counts how many items are read from it."""

    reads = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def,override]
        result = super().__getitem__(key)
        self.reads += len(result) if isinstance(key, slice) else 1
        return result


def test_lookup_reads_a_few_tokens_however_long_the_history() -> None:
    history = CountingList(i % 977 for i in range(100_000))
    drafter = PromptLookupDrafter(3, 8, 1)
    drafter.propose(history, None, 8)
    history.reads = 0
    for token in range(1_000):
        history.append(token)
        drafter.propose(history, None, 8)
    assert history.reads <= 32 * 1_000


@pytest.mark.parametrize(("n", "smallest"), [(0, None), (2, 3), (3, 0)])
def test_lookup_refuses_impossible_sizes(n: int, smallest: int | None) -> None:
    with pytest.raises(SpecError, match="n-grams"):
        PromptLookupDrafter(n, 4, smallest)
