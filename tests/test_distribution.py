"""What is sampled is distributed as plain sampling, whatever drafts."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from mlx_spec import (
    Decoder,
    Drafter,
    DraftModelDrafter,
    PromptLookupDrafter,
    SamplingParams,
    SpeculativeOptions,
    sampling_distribution,
    speculative_decode,
)
from tests.fakes import BadSoftmaxDrafter, Pair, tiny_decoder

VOCAB, HORIZON, SEEDS = 6, 3, 4_000
PROMPT = [1, 2, 1, 2, 1]
SETTINGS = {
    "temperature": SamplingParams(temperature=1),
    "top-k": SamplingParams(temperature=1, top_k=3),
    "top-p": SamplingParams(temperature=1.3, top_p=0.8),
    "min-p": SamplingParams(temperature=0.8, min_p=0.2),
    "penalties": SamplingParams(
        temperature=1,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
    ),
}
DRAFTERS: dict[str, Callable[[int], Drafter]] = {
    "lookup": lambda seed: PromptLookupDrafter(2, 3, 1),
    "bad softmax": lambda seed: BadSoftmaxDrafter(VOCAB, 3, seed),
}


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return tiny_decoder(VOCAB, seed=4)


def exact_marginals(decoder: Decoder, params: SamplingParams) -> np.ndarray:
    """Enumerate every continuation: (HORIZON, VOCAB) probabilities of each position."""
    marginals = np.zeros((HORIZON, VOCAB))
    for prefix_length in range(HORIZON):
        for prefix in product(range(VOCAB), repeat=prefix_length):
            tokens = [*PROMPT, *prefix]
            rows = decoder.forward_batch(tokens, 0, decoder.new_cache())
            weight = 1.0
            for i, token in enumerate(prefix):
                history = tokens[: len(PROMPT) + i]
                row = sampling_distribution(rows[len(history) - 1], params, history)
                weight *= float(row[token].item())
            row = sampling_distribution(rows[-1], params, tokens)
            marginals[prefix_length] += weight * np.array(row)
    return marginals


def sampled_marginals(
    decoder: Decoder,
    params: SamplingParams,
    make: Callable[[int], Drafter | None],
    rule: str = "rejection",
) -> np.ndarray:
    counts = np.zeros((HORIZON, VOCAB))
    for seed in range(SEEDS):
        options = SpeculativeOptions(
            max_new_tokens=HORIZON,
            sampling=params,
            seed=seed,
            rule=rule,  # type: ignore[arg-type]
        )
        result = speculative_decode(decoder, PROMPT, make(seed), options)
        for position, token in enumerate(result.generated_tokens):
            counts[position, token] += 1
    return counts / SEEDS


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    # One of 4,000 draws has a sigma of at most 0.008; 0.03 is nearly four of them.
    assert np.abs(found - expected).max() < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_marginals_equal_the_enumerated_ones(
    decoder: Decoder, setting: str, drafter: str
) -> None:
    params = SETTINGS[setting]
    found = sampled_marginals(decoder, params, DRAFTERS[drafter])
    assert_close(found, exact_marginals(decoder, params))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [*DRAFTERS, "model", "none"])
def test_marginals_equal_the_enumerated_ones_when_coupled(
    decoder: Decoder, drafter: str
) -> None:
    params = SETTINGS["top-p"]
    model = DraftModelDrafter(None, Pair(tiny_decoder(VOCAB, seed=5)), 2)
    make = DRAFTERS | {"model": lambda seed: model, "none": lambda seed: None}
    found = sampled_marginals(decoder, params, make[drafter], "coupled")
    assert_close(found, exact_marginals(decoder, params))


@pytest.mark.slow
def test_marginals_equal_the_enumerated_ones_with_a_draft_model(
    decoder: Decoder,
) -> None:
    params = SamplingParams(temperature=1.1, top_p=0.9, frequency_penalty=0.3)
    model = DraftModelDrafter(None, Pair(tiny_decoder(VOCAB, seed=5)), 2)
    found = sampled_marginals(decoder, params, lambda seed: model)
    assert_close(found, exact_marginals(decoder, params))


@pytest.mark.parametrize("max_draft", [1, 2, 5, 16])
@pytest.mark.parametrize("drafter", ["lookup", "bad softmax", "model"])
def test_coupled_text_is_identical_for_two_hundred_seeds(
    drafter: str, max_draft: int
) -> None:
    decoder = tiny_decoder(VOCAB, seed=4)
    model = DraftModelDrafter(None, Pair(tiny_decoder(VOCAB, seed=5)), 16)
    make: dict[str, Callable[[int], Drafter]] = {
        "lookup": lambda seed: PromptLookupDrafter(1, 16),
        "bad softmax": lambda seed: BadSoftmaxDrafter(VOCAB, 16, seed),
        "model": lambda seed: model,
    }
    for seed in range(200):
        options = SpeculativeOptions(
            max_new_tokens=12,
            sampling=SamplingParams(temperature=0.8, top_p=0.9),
            seed=seed,
            rule="coupled",
        )
        alone = speculative_decode(decoder, PROMPT, None, options)
        limited = SpeculativeOptions(
            max_new_tokens=12,
            sampling=options.sampling,
            seed=seed,
            rule="coupled",
            max_draft_tokens=max_draft,
        )
        drafted = speculative_decode(decoder, PROMPT, make[drafter](seed), limited)
        assert drafted.generated_tokens == alone.generated_tokens


def test_a_perfect_draft_model_is_always_accepted() -> None:
    decoder = tiny_decoder(VOCAB, seed=4)
    params = SamplingParams(temperature=1)
    for rule in ("rejection", "coupled"):
        drafter = DraftModelDrafter(None, Pair(tiny_decoder(VOCAB, seed=4)), 4)
        options = SpeculativeOptions(
            max_new_tokens=60,
            sampling=params,
            rule=rule,  # type: ignore[arg-type]
        )
        result = speculative_decode(decoder, PROMPT, drafter, options)
        rate = result.accept_rate()
        assert rate is not None
        assert rate > 0.98  # all but rounding at p(x) = q(x)


def test_seeds_give_different_texts() -> None:
    decoder = tiny_decoder(VOCAB, seed=4)
    texts = {
        tuple(
            speculative_decode(
                decoder,
                PROMPT,
                None,
                SpeculativeOptions(
                    max_new_tokens=12, sampling=SamplingParams(temperature=1), seed=seed
                ),
            ).generated_tokens
        )
        for seed in range(20)
    }
    assert len(texts) > 15
