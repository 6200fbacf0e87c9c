"""A real model on real text: parity, losslessness, the second turn."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_spec import (
    Conversation,
    DraftModelDrafter,
    LoadedModel,
    PromptLookupDrafter,
    SpeculativeOptions,
    generate,
    load,
    speculative_decode,
    stream_generate,
)
from mlx_spec.loading import load_decoder

pytestmark = [pytest.mark.model, pytest.mark.slow]

Build = Callable[[str], Path]
FORMS = ["4bit", "float16", "mixtral"]
TEXT = (
    "The water cycle describes how water moves between the oceans, the air and the "
    "land. Heat from the sun evaporates water, which rises, cools and falls as rain."
)


@pytest.mark.parametrize("form", FORMS)
def test_logits_equal_mlx_lms_on_real_text(form: str, smollm2: Build) -> None:
    from mlx_lm import load as load_reference

    reference, tokenizer = load_reference(str(smollm2(form)))
    reference.set_dtype(mx.float32)
    tokens = tokenizer.encode(TEXT)
    expected = reference(mx.array(tokens)[None])[0]
    decoder = load_decoder(smollm2(form), dtype="float32")
    cache = decoder.new_cache()
    rows = [
        decoder.forward_batch(tokens[:16], 0, cache),
        decoder.forward_token(tokens[16], 16, cache)[None],
        decoder.forward_batch(tokens[17:], 17, cache),
    ]
    found = mx.concatenate(rows)
    # Logits of this model reach 30; 2e-3 is float32 rounding over 30 layers.
    assert mx.abs(found - expected).max() < 2e-3
    assert mx.array_equal(mx.argmax(found, axis=-1), mx.argmax(expected, axis=-1))


def test_dense_and_mixture_agree_on_every_greedy_token(smollm2: Build) -> None:
    prompt = "Explain in two sentences why the sky is blue."
    texts = [
        [r.token for r in stream_generate(smollm2(form), prompt, max_tokens=48)]
        for form in ("float16", "mixtral")
    ]
    assert texts[0] == texts[1]


@pytest.fixture(scope="module")
def model(smollm2: Build) -> LoadedModel:
    return load(smollm2("4bit"), "none")


PROMPTS = {
    "prose": "Write two sentences about the sea.",
    "copy": "Repeat this sentence exactly: The lighthouse stood on the northern cliff "
    "above the cold grey sea.",
}


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_greedy_text_equals_plain_decoding(
    name: str, rule: str, model: LoadedModel
) -> None:
    plain = generate(model, PROMPTS[name], max_tokens=48)
    drafted = generate(
        model,
        PROMPTS[name],
        max_tokens=48,
        drafter=PromptLookupDrafter(3, 8, 1),
        rule=rule,  # type: ignore[arg-type]
    )
    assert drafted == plain
    assert len(plain) > 40


def test_copying_is_mostly_accepted(model: LoadedModel) -> None:
    last = list(
        stream_generate(model, PROMPTS["copy"], max_tokens=32, drafter="lookup")
    )[-1]
    rate = last.stats.accept_rate()
    assert rate is not None
    assert rate > 0.8
    length = last.stats.acceptance_length()
    assert length is not None
    assert length > 3


def test_a_draft_model_drafts_for_another_form_of_itself(
    smollm2: Build, model: LoadedModel
) -> None:
    prompt = PROMPTS["prose"]
    plain = generate(model, prompt, max_tokens=24)
    last, text = None, ""
    for last in stream_generate(
        model, prompt, max_tokens=24, draft_model=smollm2("float16")
    ):
        text += last.text
    assert text == plain
    assert last is not None
    rate = last.stats.accept_rate()
    assert rate is not None
    assert rate > 0.9  # the same weights, rounded once


def test_a_seed_gives_the_same_text_with_any_drafter_when_coupled(
    smollm2: Build, model: LoadedModel
) -> None:
    settings = {"temp": 0.8, "top_p": 0.9, "seed": 3, "rule": "coupled"}
    prompt = PROMPTS["prose"]
    plain = generate(model, prompt, max_tokens=24, **settings)  # type: ignore[arg-type]
    for drafter in (
        PromptLookupDrafter(2, 6, 1),
        DraftModelDrafter(model.tokenizer, load(smollm2("float16"), "none"), 3),
    ):
        found = generate(model, prompt, max_tokens=24, drafter=drafter, **settings)  # type: ignore[arg-type]
        assert found == plain


@pytest.mark.parametrize("drafter", ["none", "lookup"])
def test_the_second_turn_prefills_only_the_new_tokens(
    drafter: str, model: LoadedModel
) -> None:
    conversation = Conversation(model.target)
    messages = [{"role": "user", "content": "Name a colour."}]
    first = list(
        stream_generate(
            model,
            messages,
            max_tokens=30,
            drafter=drafter,  # type: ignore[arg-type]
            conversation=conversation,
        )
    )
    messages += [
        {"role": "assistant", "content": "".join(r.text for r in first)},
        {"role": "user", "content": "Name another one."},
    ]
    second = list(
        stream_generate(
            model,
            messages,
            max_tokens=20,
            drafter=drafter,  # type: ignore[arg-type]
            conversation=conversation,
        )
    )
    assert first[-1].finish_reason == "stop"
    # Everything of turn one is reused, but the end-of-text token that closed it.
    held = first[0].prompt_tokens + len(first) - 1
    assert second[0].cached_tokens == held
    fresh = generate(model, messages, max_tokens=20, drafter="none")
    assert "".join(r.text for r in second) == fresh


@pytest.mark.parametrize("kv_bits", [8, 4])
def test_quantized_caches_keep_speculation_lossless(
    kv_bits: int, smollm2: Build
) -> None:
    quantized = load(smollm2("4bit"), "none", kv_bits=kv_bits)
    plain = generate(quantized, PROMPTS["copy"], max_tokens=32)
    drafted = generate(
        quantized, PROMPTS["copy"], max_tokens=32, drafter=PromptLookupDrafter(2, 6)
    )
    assert drafted == plain


def test_prefill_in_chunks_equals_prefill_at_once(model: LoadedModel) -> None:
    tokens = model.tokenizer.encode(TEXT)
    results = [
        speculative_decode(
            model.target,
            tokens,
            None,
            SpeculativeOptions(max_new_tokens=8, prefill_step=step),
        ).generated_tokens
        for step in (2048, 7)
    ]
    assert results[0] == results[1]
