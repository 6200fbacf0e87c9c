"""Text in, text out: templates, stop texts, conversations, figures."""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_spec import (
    CapacityError,
    Conversation,
    LoadedModel,
    PromptLookupDrafter,
    SpecError,
    generate,
    generation,
    load,
    stream_generate,
)
from mlx_spec.generation import GenerationResponse, _StopText, encode_prompt
from tests.checkpoints import write_text_checkpoint

PROMPT = "abcabcabc"
DRAFTERS = ["none", "lookup", "model"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("generation") / "model")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, LoadedModel]:
    return {
        "none": load(folder, "none"),
        "lookup": load(folder, PromptLookupDrafter(2, 6, 1)),
        "model": load(folder, draft_model=folder),
    }


@pytest.fixture(scope="module")
def plain(models: dict[str, LoadedModel]) -> list[GenerationResponse]:
    return list(stream_generate(models["none"], PROMPT, max_tokens=40))


@pytest.mark.parametrize("name", DRAFTERS)
def test_text_and_tokens_are_the_same_with_any_drafter(
    name: str, models: dict[str, LoadedModel], plain: list[GenerationResponse]
) -> None:
    found = list(stream_generate(models[name], PROMPT, max_tokens=40))
    assert [r.token for r in found] == [r.token for r in plain]
    assert "".join(r.text for r in found) == "".join(r.text for r in plain)
    assert generate(models[name], PROMPT, max_tokens=40) == "".join(
        r.text for r in plain
    )


@pytest.mark.parametrize("name", DRAFTERS)
def test_text_of_a_seed_is_the_same_with_any_drafter_when_coupled(
    name: str, models: dict[str, LoadedModel]
) -> None:
    for seed in range(5):
        settings = {"temp": 0.9, "top_p": 0.95, "seed": seed, "rule": "coupled"}
        alone = generate(models["none"], PROMPT, max_tokens=20, **settings)  # type: ignore[arg-type]
        found = generate(models[name], PROMPT, max_tokens=20, **settings)  # type: ignore[arg-type]
        assert found == alone


def test_a_folder_can_be_given_instead_of_a_loaded_model(
    folder: Path, plain: list[GenerationResponse]
) -> None:
    text = generate(folder, PROMPT, drafter="lookup", max_tokens=40)
    assert text == "".join(response.text for response in plain)


def test_text_messages_and_ids_are_the_same_prompt(
    models: dict[str, LoadedModel],
) -> None:
    tokenizer = models["none"].tokenizer
    ids = encode_prompt(tokenizer, PROMPT)
    assert encode_prompt(tokenizer, [{"role": "user", "content": PROMPT}]) == ids
    assert encode_prompt(tokenizer, ids) == ids
    assert tokenizer.decode(ids) == (
        f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(encode_prompt(tokenizer, PROMPT, raw=True)) == PROMPT


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_an_empty_prompt_is_refused(
    prompt: str | list[int], models: dict[str, LoadedModel]
) -> None:
    with pytest.raises(SpecError, match="prompt is empty"):
        generate(models["none"], prompt)


def test_messages_need_a_chat_template(
    folder: Path, models: dict[str, LoadedModel]
) -> None:
    class Bare:
        has_chat_template = False

    with pytest.raises(SpecError, match="no chat template"):
        encode_prompt(Bare(), [{"role": "user", "content": "hi"}])  # type: ignore[arg-type]


def test_messages_that_the_template_refuses_are_an_error(folder: Path) -> None:
    model = load(folder, "none")
    refusing = "{{ raise_exception('no system role') }}"
    model.tokenizer.chat_template = refusing  # type: ignore[attr-defined]
    with pytest.raises(SpecError, match=r"refuses these messages \(user\): no system"):
        generate(model, "hi")


@pytest.mark.parametrize("name", DRAFTERS)
def test_responses_carry_mlx_lms_fields(
    name: str, models: dict[str, LoadedModel]
) -> None:
    from mlx_lm.generate import GenerationResponse as Reference

    responses = list(stream_generate(models[name], PROMPT, max_tokens=12))
    for count, response in enumerate(responses, start=1):
        for field in Reference.__dataclass_fields__:
            assert hasattr(response, field)
        assert response.generation_tokens == count
        assert response.prompt_tokens == len(
            encode_prompt(models[name].tokenizer, PROMPT)
        )
        assert response.logprobs.shape == (300,)
        assert mx.argmax(response.logprobs).item() == response.token
        assert mx.allclose(mx.exp(response.logprobs).sum(), mx.array(1.0), atol=1e-4)
    assert [r.finish_reason for r in responses[:-1]] == [None] * 11
    assert responses[-1].finish_reason == "length"
    last = responses[-1]
    assert last.generation_tps > 0
    assert last.prompt_tps > 0
    assert last.peak_memory > 0
    assert last.cache_bytes > 0
    drafted = sum(r.from_draft for r in responses)
    assert drafted == last.stats.accepted_tokens


def test_the_readers_time_is_not_counted(
    models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            self.now += 0.001
            return self.now

    clock = Clock()
    monkeypatch.setattr(generation, "time", clock)
    rate = 0.0
    for response in stream_generate(models["none"], PROMPT, max_tokens=20):
        clock.now += 1000  # the reader thinks about it
        rate = response.generation_tps
    assert rate == pytest.approx(1000)  # a millisecond for each of 19 rounds


def visible(responses: Iterator[GenerationResponse]) -> tuple[str, str | None]:
    texts, reason = [], None
    for response in responses:
        texts.append(response.text)
        reason = response.finish_reason
    return "".join(texts), reason


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("begin", [0, 3, 11])
def test_a_stop_text_ends_the_answer_and_is_not_shown(
    name: str,
    length: int,
    begin: int,
    models: dict[str, LoadedModel],
    plain: list[GenerationResponse],
) -> None:
    model = models[name]
    whole = "".join(response.text for response in plain)
    stop = whole[begin : begin + length]
    conversation = Conversation(model.target)
    text, reason = visible(
        stream_generate(
            model,
            PROMPT,
            max_tokens=40,
            stop=["never there", stop],
            conversation=conversation,
        )
    )
    assert text == whole[: whole.index(stop)]
    assert reason == "stop"
    assert conversation.cache.seq_len == len(conversation.tokens) - 1
    decoded = model.tokenizer.decode(conversation.tokens)
    assert stop in decoded[-len(stop) - 8 :]


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["a", "b", "c"], ["bc"], "a"),
        (["ab", "abc", "x"], ["abc"], "ab"),
        (["aab"], ["ab"], "a"),
        (["a", "a", "a"], ["ab"], "aaa"),
        (["x", "END", "y"], ["END", "xE"], ""),
        (["abc"], [""], "abc"),
    ],
)
def test_stop_texts_across_pieces(
    pieces: list[str], stop: list[str], expected: str
) -> None:
    finder, shown = _StopText(stop), ""
    for index, piece in enumerate(pieces):
        text, found = finder.push(piece, index == len(pieces) - 1)
        shown += text
        if found:
            break
    assert shown == expected


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("count", [1, 2, 7, 12])
def test_a_reader_who_stops_leaves_a_conversation_that_goes_on(
    name: str, count: int, models: dict[str, LoadedModel]
) -> None:
    model = models[name]
    conversation = Conversation(model.target)
    stream = stream_generate(model, PROMPT, max_tokens=40, conversation=conversation)
    taken = [next(stream) for _ in range(count)]
    stream.close()  # type: ignore[attr-defined]
    prompt = encode_prompt(model.tokenizer, PROMPT)
    tokens = [*prompt, *(response.token for response in taken)]
    assert conversation.tokens == tokens
    assert conversation.cache.seq_len == len(tokens) - 1
    following = [5, 6, 7]
    again = list(
        stream_generate(
            model, [*tokens, *following], max_tokens=10, conversation=conversation
        )
    )
    fresh = list(stream_generate(model, [*tokens, *following], max_tokens=10))
    assert [r.token for r in again] == [r.token for r in fresh]
    assert again[0].cached_tokens == len(tokens) - 1


@pytest.mark.parametrize("name", DRAFTERS)
def test_edited_and_retried_turns_reuse_what_they_share(
    name: str, models: dict[str, LoadedModel]
) -> None:
    model, conversation = models[name], Conversation(models[name].target)
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9], [1, 2, 3, 9, 9], [7], [1, 2, 3]]
    reused = []
    for prompt in prompts:
        found = list(
            stream_generate(model, prompt, max_tokens=6, conversation=conversation)
        )
        fresh = list(stream_generate(model, prompt, max_tokens=6))
        assert [r.token for r in found] == [r.token for r in fresh]
        reused.append(found[0].cached_tokens)
    assert reused == [0, 3, 4, 0, 0]


def test_end_of_text_is_not_shown(folder: Path) -> None:
    model = load(folder, "lookup")
    tokens = [r.token for r in stream_generate(model, PROMPT, max_tokens=10)]
    end = tokens[4]
    ended = model.tokenizer
    ended.eos_token_ids = {end}  # type: ignore[misc]
    responses = list(stream_generate(model, PROMPT, max_tokens=10))
    first = tokens.index(end)
    assert [r.token for r in responses] == tokens[: first + 1]
    assert responses[-1].finish_reason == "stop"
    shown = "".join(r.text for r in responses)
    assert shown == model.tokenizer.decode(tokens[:first])


def test_a_prompt_longer_than_the_context_is_refused(
    models: dict[str, LoadedModel],
) -> None:
    with pytest.raises(CapacityError, match="513 tokens, the model's context is 512"):
        generate(models["none"], [1] * 513)


@pytest.mark.parametrize("name", DRAFTERS)
def test_an_answer_ends_where_the_context_does(
    name: str, models: dict[str, LoadedModel]
) -> None:
    responses = list(stream_generate(models[name], [3] * 500, max_tokens=100))
    assert len(responses) == 13
    assert responses[-1].finish_reason == "length"


def test_an_answer_that_cannot_fit_the_memory_is_refused(folder: Path) -> None:
    model = load(folder, "none")
    plan = model.target.memory_plan
    limit = plan.weight_bytes + plan.cache_bytes(256)
    small = load(folder, "none", memory_limit=limit)
    assert generate(small, [1] * 10, max_tokens=50)
    with pytest.raises(CapacityError, match="up to 256 tokens fit"):
        generate(small, [1] * 10, max_tokens=300)


def test_characters_of_several_tokens_are_never_split(
    models: dict[str, LoadedModel],
) -> None:
    text = "".join(
        r.text for r in stream_generate(models["lookup"], "é€😀", max_tokens=60)
    )
    assert text == generate(models["none"], "é€😀", max_tokens=60)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("taken", [1, 3, 7])
def test_a_turn_closed_late_does_not_touch_the_next_one(
    name: str, taken: int, models: dict[str, LoadedModel]
) -> None:
    model = models[name]
    expected = [r.token for r in stream_generate(model, "abcabcabd", max_tokens=12)]
    conversation = Conversation(model.target)
    old = stream_generate(model, PROMPT, conversation=conversation, max_tokens=20)
    for _ in range(taken):
        next(old)
    new = stream_generate(model, "abcabcabd", conversation=conversation, max_tokens=12)
    tokens = [next(new).token for _ in range(taken)]
    old.close()  # type: ignore[attr-defined]
    tokens += [r.token for r in new]
    assert tokens == expected
    prompt = encode_prompt(model.tokenizer, "abcabcabd")
    assert conversation.tokens == [*prompt, *expected]
    assert conversation.cache.seq_len == len(conversation.tokens) - 1


def test_going_on_with_a_turn_that_another_replaced_is_refused(
    models: dict[str, LoadedModel],
) -> None:
    model = models["lookup"]
    conversation = Conversation(model.target)
    old = stream_generate(model, [1, 2, 3, 4], conversation=conversation, raw=True)
    next(old)
    list(stream_generate(model, [5, 6], conversation=conversation, max_tokens=9))
    with pytest.raises(SpecError, match="another turn"):
        list(old)
    again = list(
        stream_generate(model, [5, 6], conversation=conversation, max_tokens=9)
    )
    fresh = list(stream_generate(model, [5, 6], max_tokens=9))
    assert [r.token for r in again] == [r.token for r in fresh]


def test_the_draft_model_and_its_cache_are_counted_too(folder: Path) -> None:
    alone = load(folder, "none").target.memory_plan
    weights, cache = alone.weight_bytes, alone.cache_bytes(256)
    pair = load(folder, draft_model=folder, memory_limit=2 * (weights + cache))
    assert pair.target.memory_plan.weight_bytes == 2 * weights
    assert generate(pair, [1] * 10, max_tokens=50)
    with pytest.raises(CapacityError, match="up to 256 tokens fit"):
        generate(pair, [1] * 10, max_tokens=300)
    with pytest.raises(CapacityError, match="smaller model"):
        load(folder, draft_model=folder, memory_limit=2 * weights)
