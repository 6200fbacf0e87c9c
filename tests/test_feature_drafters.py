"""Drafters that look into the target: their state, and what they may not change."""

from collections.abc import Sequence
from random import Random

import mlx.core as mx
import pytest

from mlx_spec import (
    Conversation,
    Decoder,
    DraftBlock,
    LoadError,
    ModelConfig,
    SamplingParams,
    SpeculativeOptions,
    speculative_decode,
    speculative_decode_with,
)
from mlx_spec.draft import FeatureDrafter
from mlx_spec.drafters.dflash import DFlashNetwork
from mlx_spec.drafters.eagle3 import Eagle3Head
from mlx_spec.drafters.mtp import MTPHead
from mlx_spec.drafters.published import kind_of
from mlx_spec.target import Features
from tests import heads
from tests.heads import KINDS, TARGET, new_drafter


@pytest.fixture(scope="module")
def target() -> Decoder:
    return Decoder.random(ModelConfig.from_hf(TARGET), 3)


def rebuilt(kind: str, target: Decoder, history: Sequence[int]) -> DraftBlock:
    """What a new drafter proposes that saw all committed tokens at once."""
    drafter = new_drafter(kind, target)
    assert isinstance(drafter, FeatureDrafter)
    rows = target.forward(history[:-1], 0, target.new_cache(), taps=drafter.taps)
    drafter.observe(history, Features(0, rows.hidden, rows.taps))
    return drafter.propose(history, None, 5)


class Checked:
    """Compares each draft with a rebuilt drafter's, and proposes what gets accepted.

    Random heads are never right; so that roll-backs of every length happen, the block
    it returns is the true continuation up to a random place.
    """

    def __init__(
        self, kind: str, target: Decoder, seed: int, truth: Sequence[int] = ()
    ) -> None:
        self._kind = kind
        self._target = target
        self._inner = new_drafter(kind, target)
        assert isinstance(self._inner, FeatureDrafter)
        self.taps, self.lookback = self._inner.taps, self._inner.lookback
        self._observe = self._inner.observe
        self._rng = Random(seed)
        self.truth = list(truth)
        self.compared = 0

    def observe(self, history: Sequence[int], features: Features) -> None:
        self._observe(history, features)

    def propose(
        self, history: Sequence[int], target_hidden: mx.array | None, max_len: int
    ) -> DraftBlock:
        if self._rng.random() < 0.8:  # now and then it is not asked for some rounds
            block = self._inner.propose(history, target_hidden, 5)
            expected = rebuilt(self._kind, self._target, history)
            assert len(block) == 5
            assert block.tokens == expected.tokens
            self.compared += 1
        length = self._rng.randint(0, 5)
        tokens = self.truth[len(history) : len(history) + length]
        if tokens and self._rng.random() < 0.7:
            wrong = self._rng.randrange(len(tokens))
            tokens[wrong] = (tokens[wrong] + 1) % self._target.vocab_size
        return DraftBlock.deterministic(tokens[:max_len])


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_proposes_what_a_rebuilt_one_would(
    kind: str, target: Decoder
) -> None:
    prompt = [5, 9, 2, 30, 11]
    options = SpeculativeOptions(40)
    plain = speculative_decode(target, prompt, None, options).generated_tokens
    checked = Checked(kind, target, 1, [*prompt, *plain])
    result = speculative_decode(target, prompt, checked, options)
    assert result.generated_tokens == plain
    assert checked.compared > 8
    assert result.accepted_tokens > 5


@pytest.mark.parametrize("step", [3, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_long_prompts_are_seen_chunk_by_chunk(
    kind: str, step: int, target: Decoder
) -> None:
    rng = Random(step)
    prompt = [rng.randrange(50) for _ in range(150)]
    options = SpeculativeOptions(8, prefill_step=step)
    checked = Checked(kind, target, 3)
    speculative_decode(target, prompt, checked, options)
    assert checked.compared > 2


@pytest.mark.parametrize("kind", KINDS)
def test_turns_edits_and_retries_keep_a_drafter_in_step(
    kind: str, target: Decoder
) -> None:
    checked = Checked(kind, target, 5)
    conversation = Conversation(target)
    rng = Random(7)
    prompt = [rng.randrange(50) for _ in range(12)]
    for turn in range(8):
        fresh = speculative_decode(target, prompt, None, SpeculativeOptions(12))
        checked.truth = [*prompt, *fresh.generated_tokens]
        start = conversation.prepare(prompt, checked)
        kept = rng.randint(1, 12)  # the consumer may stop anywhere
        tokens: list[int] = []
        options = SpeculativeOptions(12, start_pos=start)
        for event in conversation.run(prompt, checked, options):
            for token in event.tokens:
                if len(tokens) < kept:
                    tokens.append(token)
                    conversation.keep(token, conversation.turn)
            if len(tokens) == kept:
                break
        conversation.close_turn(conversation.turn)
        assert tokens == fresh.generated_tokens[: len(tokens)]
        match turn % 3:
            case 0:  # go on
                prompt = [*prompt, *tokens, rng.randrange(50), rng.randrange(50)]
            case 1:  # edit the middle
                prompt = [*prompt[: len(prompt) // 2], rng.randrange(50)]
            case _:  # retry as it is
                pass
    assert checked.compared > 12


@pytest.mark.parametrize("kind", KINDS)
def test_two_conversations_may_share_a_drafter(kind: str, target: Decoder) -> None:
    drafter = new_drafter(kind, target)
    options = SpeculativeOptions(12)
    prompts = [[1, 2, 3], [1, 2, 4, 9]]
    expected = [speculative_decode(target, p, None, options) for p in prompts]
    conversations = [Conversation(target) for _ in prompts]
    streams = []
    for conversation, prompt in zip(conversations, prompts, strict=True):
        conversation.prepare(prompt, drafter)
        streams.append(conversation.run(prompt, drafter, options))
    tokens: list[list[int]] = [[], []]
    for events in zip(*streams, strict=False):
        for sink, event in zip(tokens, events, strict=True):
            sink += event.tokens
    for sink, result in zip(tokens, expected, strict=True):
        assert sink == result.generated_tokens[: len(sink)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_never_changes_greedy_text(kind: str, target: Decoder) -> None:
    for seed in range(4):
        prompt = [Random(seed).randrange(50) for _ in range(6)]
        plain = speculative_decode(target, prompt, None, SpeculativeOptions(30))
        fast = speculative_decode(
            target, prompt, new_drafter(kind, target), SpeculativeOptions(30)
        )
        assert fast.generated_tokens == plain.generated_tokens
        assert fast.drafted_tokens > 30


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_cache_whose_rows_were_never_seen_is_no_error(
    kind: str, target: Decoder
) -> None:
    cache = target.new_cache()
    context, prompt = [4, 8, 15, 16, 23], [42, 3]
    target.prefill(context, 0, cache)
    options = SpeculativeOptions(20, start_pos=5)
    fast = speculative_decode_with(
        target, cache, prompt, new_drafter(kind, target), options, context=context
    )
    plain = speculative_decode(
        target, [*context, *prompt], None, SpeculativeOptions(20)
    )
    assert fast.generated_tokens == plain.generated_tokens
    assert fast.drafted_tokens > 0
    unseen = target.new_cache()
    target.prefill(context, 0, unseen)
    fast = speculative_decode_with(
        target, unseen, prompt, new_drafter(kind, target), options
    )
    assert fast.generated_tokens == plain.generated_tokens
    assert fast.drafted_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_coupled_rule_gives_one_text(kind: str, seed: int, target: Decoder) -> None:
    options = SpeculativeOptions(
        30, sampling=SamplingParams(0.9, top_k=20), seed=seed, rule="coupled"
    )
    plain = speculative_decode(target, [7, 7], None, options)
    fast = speculative_decode(target, [7, 7], new_drafter(kind, target), options)
    assert fast.generated_tokens == plain.generated_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampled_draft_comes_with_the_distribution_it_was_drawn_from(
    kind: str, target: Decoder
) -> None:
    drafter = new_drafter(kind, target)
    history = [3, 1, 4, 1, 5]
    rows = target.forward(history[:-1], 0, target.new_cache(), taps=drafter.taps)  # type: ignore[attr-defined]
    counts: dict[int, int] = {}
    for seed in range(400):
        drafter.follow(SamplingParams(1.0), seed, False, target.vocab_size)  # type: ignore[attr-defined]
        drafter.observe(history, Features(0, rows.hidden, rows.taps))  # type: ignore[attr-defined]
        block = drafter.propose(history, None, 3)
        first = block.dists[0]
        counts[block.tokens[0]] = counts.get(block.tokens[0], 0) + 1
        for token, dist in zip(block.tokens, block.dists, strict=True):
            assert dist.prob(token) > 0
    total = sum(abs(counts.get(t, 0) / 400 - first.prob(t)) for t in range(50))
    assert total / 2 < 0.15


def test_kinds_are_told_from_the_config() -> None:
    assert kind_of(heads.eagle3()[0]) == "eagle3"
    assert kind_of(heads.dflash(1)[0]) == "dflash"
    assert kind_of(heads.dflash(2)[0]) == "dflash"
    assert kind_of({"speculators_model_type": "eagle3"}) == "eagle3"
    assert kind_of(TARGET) == "model"


def test_speculators_count_taps_from_the_embedding(target: Decoder) -> None:
    config, tensors = heads.eagle3("layers.0")
    nested = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": config,
        "draft_vocab_size": heads.DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
    }
    head = Eagle3Head(nested, tensors, "a test", target, None)
    assert head.taps == (1, 2, 3)


@pytest.mark.parametrize(
    ("kind", "change", "expected"),
    [
        (
            "eagle3",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9, 3]}},
            "9",
        ),
        ("eagle3", {"vocab_size": 60}, "vocab_size 60, the target 50"),
        ("eagle3", {"target_hidden_size": 64}, "target_hidden_size 64, the target 32"),
        ("dflash", {"hidden_size": 64}, "hidden_size 64, the target 32"),
        ("dflash", {"num_target_layers": 7}, "num_target_layers 7, the target 5"),
        ("dflash", {"block_size": None}, "no 'block_size'"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    kind: str, change: dict[str, object], expected: str, target: Decoder
) -> None:
    config, tensors = heads.eagle3() if kind == "eagle3" else heads.dflash()
    made = Eagle3Head if kind == "eagle3" else DFlashNetwork
    with pytest.raises(LoadError, match=expected):
        made(config | change, tensors, "a test", target, None)


def test_missing_and_unknown_tensors_are_named(target: Decoder) -> None:
    config, tensors = heads.dflash()
    del tensors["layers.1.mlp.up_proj.weight"]
    with pytest.raises(LoadError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        DFlashNetwork(config, tensors, "a test", target, None)
    config, tensors = heads.dflash()
    tensors["layers.0.extra.weight"] = mx.zeros((2,))
    with pytest.raises(LoadError, match=r"layers\.0\.extra\.weight"):
        DFlashNetwork(config, tensors, "a test", target, None)
    with pytest.raises(LoadError, match="no multi-token prediction layer"):
        MTPHead(TARGET, {}, "a test", target, None)
