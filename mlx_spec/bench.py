"""Benchmarks: each compares things in one run, interleaved, and reports ratios.

Every function returns plain rows (name → value) for a table or JSON. Times are
medians in seconds unless a name says otherwise; a figure holds for the machine it
was measured on.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_spec.cache import KVCache
from mlx_spec.conversation import Conversation
from mlx_spec.decoder import Decoder
from mlx_spec.draft import DraftBlock, Drafter
from mlx_spec.drafters.lookup import PromptLookupDrafter
from mlx_spec.generation import stream_generate
from mlx_spec.loading import LoadedModel, resolve_folder
from mlx_spec.sampling import SamplingParams
from mlx_spec.speculative import SpeculativeOptions, speculative_stream
from mlx_spec.stats import SpeculativeDecodeResult

Row = dict[str, str | int | float | bool | None]

_CODE = """def area(x):
    if x < 0:
        raise ValueError("negative")
    return x * x


def volume(x):
    if x < 0:
        raise ValueError("negative")
    return x * x * x
"""
_TEXT = """The lighthouse stood on the northern cliff, and every evening the keeper \
climbed its ninety-eight steps to light the lamp. Ships from Bergen, Hull and \
Rotterdam knew its signal: two short flashes, a pause, and one long flash. In winter \
the wind tore at the railings, but the lamp never failed while he was there."""
PROMPTS = {
    "copy": f"Repeat this text exactly, word for word:\n\n{_TEXT}",
    "edit": "Rename the variable `x` to `value` in this code and print the whole "
    f"code:\n\n```python\n{_CODE}```",
    "prose": "Write a short story about a fox who learns to swim.",
}


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """How much is measured.

    Attributes:
        generation_tokens: Tokens generated a trial.
        prompt_tokens: Tokens of the prefill benchmark.
        num_trials: Measured trials, after one warm-up.
    """

    generation_tokens: int = 200
    prompt_tokens: int = 4096
    num_trials: int = 5


def bench_speed(
    model: LoadedModel,
    settings: BenchSettings,
    sampling: SamplingParams = SamplingParams(),
    prompts: dict[str, str] | None = None,
) -> list[Row]:
    """Compare the model's drafter with plain decoding, prompt by prompt."""
    rows: list[Row] = []
    for name, prompt in (prompts or PROMPTS).items():
        runs: dict[str, list[_Answer]] = {"plain": [], "drafted": []}
        for trial in range(settings.num_trials + 1):
            for kind, drafter in (("plain", None), ("drafted", model.drafter)):
                answer = _answer(model, prompt, drafter, settings, sampling)
                if trial:  # the first is the warm-up
                    runs[kind].append(answer)
        rows.append({"prompt": name, **_compare(runs["plain"], runs["drafted"])})
    return rows


@dataclass(frozen=True, slots=True)
class _Answer:
    tokens: list[int]
    stats: SpeculativeDecodeResult
    prompt_tps: float
    generation_tps: float
    peak_memory: float
    total_time: float


def _answer(
    model: LoadedModel,
    prompt: str,
    drafter: Drafter | None,
    settings: BenchSettings,
    sampling: SamplingParams,
) -> _Answer:
    mx.reset_peak_memory()
    begin = time.perf_counter()
    responses = list(
        stream_generate(
            model,
            prompt,
            drafter=drafter,
            max_tokens=settings.generation_tokens,
            temp=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            rule="coupled",
            conversation=Conversation(model.target),
        )
    )
    last = responses[-1]
    return _Answer(
        [response.token for response in responses],
        last.stats,
        last.prompt_tps,
        last.generation_tps,
        last.peak_memory,
        time.perf_counter() - begin,
    )


def _compare(plain: list[_Answer], drafted: list[_Answer]) -> Row:
    stats = drafted[-1].stats
    plain_tps = statistics.median(answer.generation_tps for answer in plain)
    tps = statistics.median(answer.generation_tps for answer in drafted)
    return {
        "generation_tokens": stats.tokens_generated,
        "prompt_tps": statistics.median(answer.prompt_tps for answer in drafted),
        "plain_tps": plain_tps,
        "generation_tps": tps,
        "speedup": tps / plain_tps,
        "identical": all(answer.tokens == plain[0].tokens for answer in drafted),
        "acceptance_length": stats.acceptance_length(),
        "acceptance_rate": stats.accept_rate(),
        "peak_memory": max(answer.peak_memory for answer in drafted),
        "total_time": statistics.median(answer.total_time for answer in drafted),
    }


def bench_mlx_lm(model: LoadedModel, settings: BenchSettings) -> list[Row]:
    """Compare plain decoding with mlx-lm's ``generate_step`` on the same weights."""
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    reference, _ = load_model(resolve_folder(model.name))
    reference.set_dtype(model.target.dtype)
    prompt = model.tokenizer.encode(_TEXT)

    def theirs() -> list[float]:
        steps = generate_step(
            mx.array(prompt), reference, max_tokens=settings.generation_tokens
        )
        return _arrival_times(token for token, _ in steps)

    def ours() -> list[float]:
        target = model.target
        options = SpeculativeOptions(max_new_tokens=settings.generation_tokens)
        return _arrival_times(
            speculative_stream(target, target.new_cache(), prompt, None, options)
        )

    times: dict[str, list[float]] = {"mlx_lm": [], "mlx_spec": []}
    for trial in range(settings.num_trials + 1):
        for name, run in (("mlx_lm", theirs), ("mlx_spec", ours)):
            if trial:
                times[name].extend(run())
            else:
                run()
    medians = {name: statistics.median(values) for name, values in times.items()}
    return [
        {
            "comparison": "plain decoding",
            "mlx_lm_tps": 1 / medians["mlx_lm"],
            "mlx_spec_tps": 1 / medians["mlx_spec"],
            "ratio": medians["mlx_lm"] / medians["mlx_spec"],
        }
    ]


def _arrival_times(items: Iterable[object]) -> list[float]:
    """Seconds between one item and the next, the first left out."""
    times: list[float] = []
    last: float | None = None
    for _ in items:
        now = time.perf_counter()
        if last is not None:
            times.append(now - last)
        last = now
    return times


class _FixedDrafter:
    """Proposes the same tokens every round, so that every round has one width."""

    def __init__(self, num_tokens: int) -> None:
        self._tokens = list(range(num_tokens))

    def propose(
        self, history: Sequence[int], target_hidden: mx.array | None, max_len: int
    ) -> DraftBlock:
        return DraftBlock.deterministic(self._tokens)


def bench_overhead(
    model: LoadedModel,
    settings: BenchSettings,
    sampling: SamplingParams,
    widths: Sequence[int] = (2, 4, 8),
) -> list[Row]:
    """Compare a round with one bare forward of its width, and with mlx-lm's sampler."""
    prompt = model.tokenizer.encode(_TEXT)
    sampler = _mlx_lm_sampler_time(model.target.vocab_size, sampling, settings)
    rows: list[Row] = []
    for width in widths:
        bare, greedy, sampled = _round_times(
            model.target, prompt, width, settings, sampling
        )
        per_row = (sampled - bare) / width
        rows.append(
            {
                "width": width,
                "forward_ms": bare * 1e3,
                "greedy_round_ms": greedy * 1e3,
                "greedy_overhead": (greedy - bare) / bare,
                "sampled_round_ms": sampled * 1e3,
                "sampled_row_ms": per_row * 1e3,
                "mlx_lm_sampler_ms": sampler * 1e3,
                "sampled_row_ratio": per_row / sampler,
            }
        )
    return rows


def _round_times(
    target: Decoder,
    prompt: Sequence[int],
    width: int,
    settings: BenchSettings,
    sampling: SamplingParams,
) -> tuple[float, float, float]:
    """Median seconds of a bare forward, a greedy round and a sampled round."""
    cache = target.new_cache()
    target.prefill(prompt, 0, cache)
    drafter = _FixedDrafter(width - 1)
    rounds = settings.generation_tokens
    streams = [
        speculative_stream(
            target,
            target.new_cache(),
            prompt,
            drafter,
            SpeculativeOptions(max_new_tokens=rounds * width, sampling=params),
        )
        for params in (SamplingParams(), sampling)
    ]
    for stream in streams:
        next(stream)
    tokens = list(range(width))

    def bare() -> None:
        logits, _ = target.forward_batch_with_hidden(tokens, len(prompt), cache)
        mx.eval(logits)
        cache.truncate(len(prompt))

    steps: list[Callable[[], object]] = [bare]
    steps += [lambda stream=stream: next(stream) for stream in streams]  # type: ignore[misc]
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds // 2):
        for step, values in zip(steps, times, strict=True):
            values.append(_seconds(step))
    first, second, third = (statistics.median(values[2:]) for values in times)
    return first, second, third


def _seconds(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def _mlx_lm_sampler_time(
    vocab_size: int, sampling: SamplingParams, settings: BenchSettings
) -> float:
    """Median seconds of mlx-lm's sampler for one row, as in ``generate_step``."""
    from mlx_lm.sample_utils import make_sampler

    sampler = make_sampler(
        temp=sampling.temperature,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        top_k=sampling.top_k,
    )
    logits = mx.random.normal((1, vocab_size), scale=3, key=mx.random.key(0))
    mx.eval(logits)

    def step() -> None:
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        mx.eval(sampler(logprobs))

    step()
    return statistics.median(
        _seconds(step) for _ in range(max(settings.generation_tokens, 20))
    )


def bench_cache(num_tokens: int = 32_768) -> list[Row]:
    """Append tokens one by one: our cache's growth against mlx-lm's."""
    from mlx_lm.models.cache import KVCache as ReferenceCache

    one = mx.ones((1, 4, 1, 64))

    def fill(append: Callable[[mx.array, mx.array], object]) -> None:
        for _ in range(num_tokens):
            mx.eval(append(one, one))

    ours = _seconds(lambda: fill(KVCache().append))
    theirs = _seconds(lambda: fill(ReferenceCache().update_and_fetch))
    return [
        {
            "appended_tokens": num_tokens,
            "mlx_lm_s": theirs,
            "mlx_spec_s": ours,
            "ratio": theirs / ours,
        }
    ]


def bench_prefill(model: LoadedModel, settings: BenchSettings) -> list[Row]:
    """Run one long prompt; the logits of its last position only."""
    text = model.tokenizer.encode(_TEXT)
    prompt = (text * (settings.prompt_tokens // len(text) + 1))[
        : settings.prompt_tokens
    ]
    cache = model.target.new_cache()
    mx.reset_peak_memory()
    active = mx.get_active_memory()
    begin = time.perf_counter()
    mx.eval(model.target.prefill(prompt, 0, cache))
    seconds = time.perf_counter() - begin
    return [
        {
            "prompt_tokens": len(prompt),
            "prompt_tps": len(prompt) / seconds,
            "cache_gb": cache.nbytes / 1e9,
            "peak_memory": mx.get_peak_memory() / 1e9,
            "peak_above_weights_gb": (mx.get_peak_memory() - active) / 1e9,
        }
    ]


def bench_lookup(history_tokens: int = 100_000) -> list[Row]:
    """Propose behind a long history, one committed token after the other."""
    history = [(i * i + i // 7) % 4_099 for i in range(history_tokens)]
    drafter = PromptLookupDrafter(4, 10, 2)
    first = _seconds(lambda: drafter.propose(history, None, 10))

    def step() -> None:
        history.append(len(history) % 4_099)
        drafter.propose(history, None, 10)

    each = statistics.median(_seconds(step) for _ in range(1_000))
    return [
        {
            "history_tokens": history_tokens,
            "first_propose_ms": first * 1e3,
            "propose_us": each * 1e6,
        }
    ]
