"""The round loop keeps its promises on the shrunk glm-5.2 preset."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from mlx_spec import (
    Decoder,
    Drafter,
    DraftModelDrafter,
    PromptLookupDrafter,
    SamplingParams,
    SpecError,
    SpeculativeDecodeResult,
    SpeculativeOptions,
    speculative_decode,
    speculative_decode_with,
    speculative_stream,
)
from tests.fakes import (
    BadSoftmaxDrafter,
    CountingTarget,
    OracleDrafter,
    Pair,
    RecordingDrafter,
    tiny_decoder,
)
from tests.numerics import is_row_invariant

PROMPT = [1, 2, 3, 4, 1, 2, 3]
LENGTH = 40


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return tiny_decoder()


@pytest.fixture(scope="module")
def plain(decoder: Decoder) -> list[int]:
    """Greedy tokens, one forward a token, by the decoder alone."""
    cache = decoder.new_cache()
    tokens = list(PROMPT)
    row = decoder.forward_batch(tokens, 0, cache)[-1]
    for position in range(len(PROMPT), len(PROMPT) + LENGTH):
        tokens.append(int(mx.argmax(row).item()))
        row = decoder.forward_token(tokens[-1], position, cache)
    return tokens[len(PROMPT) :]


def options(**changes: object) -> SpeculativeOptions:
    return SpeculativeOptions(**{"max_new_tokens": LENGTH, **changes})  # type: ignore[arg-type]


def drafters(plain: list[int]) -> dict[str, Callable[[], Drafter | None]]:
    known = [*PROMPT, *plain]
    return {
        "none": lambda: None,
        "lookup": lambda: PromptLookupDrafter(2, 5, 1),
        "bad softmax": lambda: BadSoftmaxDrafter(50, 3),
        "other model": lambda: DraftModelDrafter(None, Pair(tiny_decoder(seed=2)), 3),
        "same model": lambda: DraftModelDrafter(None, Pair(tiny_decoder()), 5),
        "oracle": lambda: OracleDrafter(known, [7, 0, 1, 16]),
        "often wrong": lambda: OracleDrafter(
            known, [4, 6], frozenset(range(9, 60, 5)), 50
        ),
    }


NAMES = ["none", "lookup", "bad softmax", "other model", "same model", "oracle"]
NAMES.append("often wrong")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_greedy_output_equals_plain_greedy_token_for_token(
    decoder: Decoder, plain: list[int], name: str, rule: str
) -> None:
    drafter = drafters(plain)[name]()
    result = speculative_decode(decoder, PROMPT, drafter, options(rule=rule))
    assert result.generated_tokens == plain


@pytest.mark.parametrize("name", NAMES)
def test_never_more_forward_calls_than_plain_decoding(
    decoder: Decoder, plain: list[int], name: str
) -> None:
    target = CountingTarget(decoder)
    result = speculative_decode(target, PROMPT, drafters(plain)[name](), options())
    assert result.forward_calls == len(target.widths)
    assert result.forward_calls <= LENGTH


def test_no_repeats_give_one_token_a_call() -> None:
    target = CountingTarget(tiny_decoder(5_000, seed=3))
    drafter = PromptLookupDrafter(2, 4)
    result = speculative_decode(target, [1, 2, 3], drafter, options(max_new_tokens=8))
    assert len(set(result.generated_tokens)) == 8, "the test needs a text that varies"
    assert target.widths == [3, *[1] * 7]
    assert result.forward_calls == 8
    assert result.drafted_tokens == 0
    assert result.accept_rate() is None
    assert result.tokens_per_call() == 1


def test_history_includes_the_anchor_and_grows_by_what_was_committed(
    decoder: Decoder, plain: list[int]
) -> None:
    script = [[], plain[2:4], [], [49, 49], plain[7:9]]
    drafter = RecordingDrafter(script)
    events = list(
        speculative_stream(
            decoder, decoder.new_cache(), PROMPT, drafter, options(max_new_tokens=12)
        )
    )
    emitted: list[int] = list(events[0].tokens)
    seen = list(drafter.histories)
    for event in events[1:]:
        if seen:  # the last round has no budget left and asks nobody
            assert seen.pop(0) == [*PROMPT, *emitted]
        emitted += event.tokens
    assert emitted == plain[:12]
    assert seen == []


def test_drafter_gets_the_hidden_state_of_the_last_cached_position_each_round(
    decoder: Decoder, plain: list[int]
) -> None:
    drafter = RecordingDrafter([[], plain[2:4], [49], []])
    speculative_decode(decoder, PROMPT, drafter, options(max_new_tokens=10))
    assert len(drafter.hiddens) == len(drafter.histories)
    for history, hidden in zip(drafter.histories, drafter.hiddens, strict=True):
        cache = decoder.new_cache()
        _, expected = decoder.forward_batch_with_hidden(history[:-1], 0, cache)
        assert hidden is not None
        assert hidden.shape == (16,)
        assert mx.allclose(hidden, expected[-1], atol=1e-5)


def test_draft_budget_is_one_short_of_what_remains(decoder: Decoder) -> None:
    drafter = RecordingDrafter()
    speculative_decode(decoder, PROMPT, drafter, options(max_new_tokens=5))
    assert drafter.budgets == [3, 2, 1]


@pytest.mark.parametrize("name", NAMES)
def test_warm_cache_gives_the_tokens_of_a_fresh_run(
    decoder: Decoder, plain: list[int], name: str
) -> None:
    cache = decoder.new_cache()
    decoder.forward_batch(PROMPT[:4], 0, cache)
    result = speculative_decode_with(
        decoder,
        cache,
        PROMPT[4:],
        drafters(plain)[name](),
        options(start_pos=4),
        context=PROMPT[:4],
    )
    assert result.generated_tokens == plain


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_context", [0, 3])
def test_cache_ends_one_short_of_context_prompt_and_generated(
    decoder: Decoder, plain: list[int], name: str, num_context: int
) -> None:
    cache = decoder.new_cache()
    if num_context:
        decoder.forward_batch(PROMPT[:num_context], 0, cache)
    for event in speculative_stream(
        decoder,
        cache,
        PROMPT[num_context:],
        drafters(plain)[name](),
        options(start_pos=num_context),
    ):
        assert event.tokens
    assert cache.seq_len == len(PROMPT) + LENGTH - 1


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("name", NAMES)
def test_two_calls_equal_one_long_call(
    decoder: Decoder, plain: list[int], name: str, rule: str
) -> None:
    cache, drafter = decoder.new_cache(), drafters(plain)[name]()
    first = speculative_decode_with(
        decoder, cache, PROMPT, drafter, options(max_new_tokens=13, rule=rule)
    )
    committed = [*PROMPT, *first.generated_tokens]
    second = speculative_decode_with(
        decoder,
        cache,
        committed[-1:],
        drafter,
        options(max_new_tokens=LENGTH - 13, start_pos=cache.seq_len, rule=rule),
        context=committed[:-1],
    )
    assert first.generated_tokens + second.generated_tokens == plain


def test_two_calls_equal_one_long_call_at_temperature_when_coupled(
    decoder: Decoder,
) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.9)
    common = {"sampling": sampling, "rule": "coupled", "seed": 4}
    whole = speculative_decode(decoder, PROMPT, None, options(**common))
    cache, drafter = decoder.new_cache(), PromptLookupDrafter(1, 4)
    first = speculative_decode_with(
        decoder, cache, PROMPT, drafter, options(max_new_tokens=9, **common)
    )
    second = speculative_decode_with(
        decoder,
        cache,
        first.generated_tokens[-1:],
        drafter,
        options(max_new_tokens=31, start_pos=cache.seq_len, **common),
    )
    joined = first.generated_tokens + second.generated_tokens
    assert joined == whole.generated_tokens


def test_a_wrong_start_pos_is_refused(decoder: Decoder) -> None:
    with pytest.raises(SpecError, match=r"start_pos is 3, but the cache holds 0"):
        speculative_decode(decoder, PROMPT, None, options(start_pos=3))
    with pytest.raises(SpecError, match=r"start_pos is 2, but the cache holds 0"):
        decoder.forward_token(1, 2, decoder.new_cache())


def test_a_context_of_another_length_is_refused(decoder: Decoder) -> None:
    cache = decoder.new_cache()
    decoder.forward_batch(PROMPT, 0, cache)
    with pytest.raises(SpecError, match="context has 1 tokens, but start_pos is 7"):
        speculative_decode_with(
            decoder, cache, [5], None, options(start_pos=7), context=[1]
        )


def test_an_empty_prompt_is_an_error(decoder: Decoder) -> None:
    with pytest.raises(SpecError, match="prompt is empty"):
        speculative_decode(decoder, [], None, options())


@pytest.mark.parametrize("name", NAMES)
def test_max_new_tokens_zero_generates_nothing_and_reports_none(
    decoder: Decoder, plain: list[int], name: str
) -> None:
    target = CountingTarget(decoder)
    result = speculative_decode(
        target, PROMPT, drafters(plain)[name](), options(max_new_tokens=0)
    )
    assert result == SpeculativeDecodeResult()
    assert target.widths == []
    assert result.tokens_per_call() is None
    assert result.acceptance_length() is None
    assert result.accept_rate() is None
    assert result.accept_rate_per_position() == []


@pytest.mark.parametrize("name", NAMES)
def test_max_new_tokens_one_needs_the_prefill_only(
    decoder: Decoder, plain: list[int], name: str
) -> None:
    target, cache = CountingTarget(decoder), decoder.new_cache()
    result = speculative_decode_with(
        target, cache, PROMPT, drafters(plain)[name](), options(max_new_tokens=1)
    )
    assert result.generated_tokens == plain[:1]
    assert target.widths == [len(PROMPT)]
    assert cache.seq_len == len(PROMPT)
    assert result.acceptance_length() is None


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_of_one_token(decoder: Decoder, plain: list[int], name: str) -> None:
    alone = speculative_decode(decoder, [7], None, options())
    drafted = speculative_decode(decoder, [7], drafters(plain)[name](), options())
    assert drafted.generated_tokens == alone.generated_tokens


@pytest.mark.parametrize("step", [1, 2, 3, 7, 100])
def test_chunked_prefill_gives_the_same_tokens(
    decoder: Decoder, plain: list[int], step: int
) -> None:
    drafter = PromptLookupDrafter(2, 5, 1)
    result = speculative_decode(decoder, PROMPT, drafter, options(prefill_step=step))
    assert result.generated_tokens == plain


@pytest.mark.parametrize("end", range(1, 12))
def test_end_of_text_inside_an_accepted_block_ends_there(
    decoder: Decoder, plain: list[int], end: int
) -> None:
    eos = plain[end]
    first = plain.index(eos)
    cache = decoder.new_cache()
    drafter = OracleDrafter([*PROMPT, *plain], [8])
    result = speculative_decode_with(
        decoder, cache, PROMPT, drafter, options(eos={eos})
    )
    assert result.generated_tokens == plain[: first + 1]
    assert result.finish_reason == "stop"
    assert cache.seq_len == len(PROMPT) + first
    assert sum(result.evaluated_at_position) <= first


@pytest.mark.parametrize("end", range(2, 12))
@pytest.mark.parametrize("name", ["none", "oracle"])
def test_stop_sequence_inside_or_across_blocks_ends_there(
    decoder: Decoder, plain: list[int], end: int, name: str
) -> None:
    stop = plain[end - 2 : end + 1]
    first = next(i for i in range(LENGTH) if plain[i : i + 3] == stop)
    cache = decoder.new_cache()
    result = speculative_decode_with(
        decoder,
        cache,
        PROMPT,
        drafters(plain)[name](),
        options(stop=[[999], stop]),
    )
    assert result.generated_tokens == plain[: first + 3]
    assert result.finish_reason == "stop"
    assert cache.seq_len == len(PROMPT) + first + 2


def test_a_stop_sequence_in_the_prompt_does_not_count(
    decoder: Decoder, plain: list[int]
) -> None:
    stop = [PROMPT[-1], plain[0]]
    result = speculative_decode(decoder, PROMPT, None, options(stop=[stop]))
    assert len(result.generated_tokens) > 1


def test_a_block_longer_than_the_budget_is_cut(
    decoder: Decoder, plain: list[int]
) -> None:
    class Greedy(RecordingDrafter):
        def propose(self, history, target_hidden, max_len):  # type: ignore[no-untyped-def]
            return super().propose(history, target_hidden, 10**6)

    drafter = Greedy([plain[1:]])
    result = speculative_decode(decoder, PROMPT, drafter, options(max_new_tokens=6))
    assert result.generated_tokens == plain[:6]
    assert result.drafted_tokens == 4


def test_max_draft_tokens_zero_is_plain_decoding(
    decoder: Decoder, plain: list[int]
) -> None:
    drafter = RecordingDrafter([[1]] * 99)
    result = speculative_decode(decoder, PROMPT, drafter, options(max_draft_tokens=0))
    assert result.generated_tokens == plain
    assert drafter.histories == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_one_host_synchronisation_a_round(
    decoder: Decoder,
    plain: list[int],
    name: str,
    temperature: float,
    rule: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = drafters(plain)[name]()
    sampling = SamplingParams(temperature=temperature, frequency_penalty=0.1)
    stream = speculative_stream(
        decoder,
        decoder.new_cache(),
        PROMPT,
        drafter,
        options(sampling=sampling, rule=rule),
    )
    next(stream)
    waits: list[str] = []

    def counted(owner: object, method: str) -> None:
        original = getattr(owner, method)

        def call(*args: object) -> object:
            waits.append(method)
            return original(*args)

        monkeypatch.setattr(owner, method, call)

    counted(mx, "eval")
    for method in ("tolist", "item", "__array__", "__bool__", "__int__", "__float__"):
        if hasattr(mx.array, method):
            counted(mx.array, method)
    for _ in stream:
        assert waits == ["tolist"]
        waits.clear()


def test_rates_per_position_expose_how_the_suffix_decays(
    decoder: Decoder, plain: list[int]
) -> None:
    known = [*PROMPT, *plain]
    wrong = frozenset(range(len(PROMPT) + 3, len(PROMPT) + LENGTH, 3))
    drafter = OracleDrafter(known, [3], wrong)
    result = speculative_decode(decoder, PROMPT, drafter, options())
    assert result.accept_rate_per_position() == [1.0, 1.0, 0.0]
    evaluated = result.evaluated_at_position
    assert result.accept_rate() == result.accepted_tokens / sum(evaluated)


def test_positions_after_a_rejection_are_not_counted(
    decoder: Decoder, plain: list[int]
) -> None:
    wrong = (plain[2] + 1) % 50
    drafter = RecordingDrafter([[plain[1], wrong, plain[3], plain[4]]])
    result = speculative_decode(decoder, PROMPT, drafter, options(max_new_tokens=8))
    assert result.drafted_tokens == 4
    assert result.evaluated_at_position == [1, 1]
    assert result.accepted_at_position == [1, 0]
    assert result.accept_rate() == 0.5
    assert result.accept_rate_per_position() == [1.0, 0.0]


def test_acceptance_length_is_per_verification_round_not_per_call(
    decoder: Decoder, plain: list[int]
) -> None:
    drafter = OracleDrafter([*PROMPT, *plain], [3])
    result = speculative_decode(decoder, PROMPT, drafter, options(max_new_tokens=13))
    assert result.forward_calls == 4
    assert result.verification_steps == 3
    assert result.acceptance_length() == 13 / 3
    assert result.tokens_per_call() == 13 / 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stop_after", [1, 2, 5, 11])
def test_stopping_the_stream_leaves_all_but_the_last_token_in_the_cache(
    decoder: Decoder, plain: list[int], name: str, stop_after: int
) -> None:
    cache, emitted = decoder.new_cache(), 0
    stream = speculative_stream(
        decoder, cache, PROMPT, drafters(plain)[name](), options()
    )
    for event in stream:
        emitted += len(event.tokens)
        assert cache.seq_len == len(PROMPT) + emitted - 1
        if emitted >= stop_after:
            break


def test_rows_are_bit_exact_where_it_is_claimed() -> None:
    """The bit-exact level is claimed for MLX's own CPU operators only."""
    if mx.default_device() == mx.Device(mx.cpu) and not is_row_invariant():
        pytest.skip("this BLAS picks its kernel by the number of rows")
    if mx.default_device() != mx.Device(mx.cpu):
        pytest.skip("stock Metal operators are not row-invariant")
    decoder = tiny_decoder()
    tokens = list(range(1, 18))
    block = decoder.forward_batch(tokens, 0, decoder.new_cache())
    cache = decoder.new_cache()
    for position, token in enumerate(tokens):
        row = decoder.forward_token(token, position, cache)
        assert mx.array_equal(row, block[position])


@pytest.mark.parametrize("name", NAMES)
def test_the_end_of_the_context_ends_every_run_alike(
    plain: list[int], name: str
) -> None:
    config = tiny_decoder().config.replace(max_position_embeddings=20)
    short = Decoder.random(config, 1)
    cache = short.new_cache()
    drafter = drafters(plain)[name]()
    result = speculative_decode_with(short, cache, PROMPT, drafter, options())
    assert result.generated_tokens == plain[:14]
    assert result.finish_reason == "length"
    assert cache.seq_len == 20
