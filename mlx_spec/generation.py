"""Text in, text out: chat template, streaming detokenizer, stop strings, figures."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import mlx.core as mx

from mlx_spec.conversation import Conversation
from mlx_spec.draft import Drafter
from mlx_spec.errors import CapacityError, SpecError
from mlx_spec.loading import DrafterKind, LoadedModel, Tokenizer, load, make_drafter
from mlx_spec.sampling import SamplingParams
from mlx_spec.speculative import Rule, SpeculativeOptions
from mlx_spec.stats import FinishReason, RoundEvent, SpeculativeDecodeResult

Messages = Sequence[Mapping[str, str]]
Prompt = str | Messages | Sequence[int]


@dataclass(frozen=True)
class GenerationResponse:
    """One generated token and the figures so far; a superset of mlx-lm's fields.

    Attributes:
        text: Text that became readable with this token, possibly empty.
        token: Its id.
        from_draft: Whether it was drafted.
        prompt_tokens: Length of the prompt in tokens.
        cached_tokens: Prompt tokens that were in the cache already.
        prompt_tps: Processed prompt tokens a second.
        generation_tokens: Generated tokens so far.
        generation_tps: Generated tokens a second, the time the consumer takes left out.
        peak_memory: In GB.
        cache_bytes: Bytes the target's cache holds.
        stats: Counters of the run so far.
        finish_reason: ``length``, ``stop``, or None while it goes on.
    """

    text: str
    token: int
    from_draft: bool
    prompt_tokens: int
    cached_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    cache_bytes: int
    stats: SpeculativeDecodeResult
    finish_reason: FinishReason | None
    _row: mx.array

    @cached_property
    def logprobs(self) -> mx.array:
        """Log-probabilities (V,) of the target's raw logits at this token."""
        return self._row - mx.logsumexp(self._row, keepdims=True)


def generate(
    model: LoadedModel | str | Path,
    prompt: Prompt,
    *,
    drafter: DrafterKind | Drafter | None = "auto",
    draft_model: str | Path | None = None,
    num_draft_tokens: int | None = None,
    max_tokens: int = 256,
    temp: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    seed: int = 0,
    rule: Rule = "rejection",
    stop: Sequence[str] = (),
    raw: bool = False,
    prefill_step_size: int = 2048,
    conversation: Conversation | None = None,
) -> str:
    """Generate an answer; the arguments are those of ``stream_generate``."""
    responses = stream_generate(
        model,
        prompt,
        drafter=drafter,
        draft_model=draft_model,
        num_draft_tokens=num_draft_tokens,
        max_tokens=max_tokens,
        temp=temp,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        seed=seed,
        rule=rule,
        stop=stop,
        raw=raw,
        prefill_step_size=prefill_step_size,
        conversation=conversation,
    )
    return "".join(response.text for response in responses)


def stream_generate(
    model: LoadedModel | str | Path,
    prompt: Prompt,
    *,
    drafter: DrafterKind | Drafter | None = "auto",
    draft_model: str | Path | None = None,
    num_draft_tokens: int | None = None,
    max_tokens: int = 256,
    temp: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    seed: int = 0,
    rule: Rule = "rejection",
    stop: Sequence[str] = (),
    raw: bool = False,
    prefill_step_size: int = 2048,
    conversation: Conversation | None = None,
) -> Iterator[GenerationResponse]:
    """Generate an answer token by token.

    Args:
        model: What ``load`` returned, a folder, or a repository id.
        prompt: Text (put into the chat template if there is one), a list of
            ``{"role", "content"}`` messages, or token ids.
        drafter: A kind or a drafter object. ``auto`` is the loaded model's own.
        draft_model: See ``load``.
        num_draft_tokens: Tokens a round drafts at most; None for the drafter's own.
        max_tokens: Tokens to generate at most.
        temp: Temperature; 0 takes the most likely token.
        top_p: Keep the most likely tokens that make up this mass.
        top_k: Keep this many most likely tokens; 0 keeps all.
        min_p: Drop tokens less likely than this share of the most likely one.
        repetition_penalty: See ``SamplingParams``; 1 is off.
        presence_penalty: See ``SamplingParams``.
        frequency_penalty: See ``SamplingParams``.
        logit_bias: Added to the logits of single token ids.
        seed: Seed of all draws.
        rule: ``rejection``, or ``coupled`` for the same text with any drafter.
        stop: Texts that end the answer; neither they nor what follows is returned.
        raw: Leave the chat template out.
        prefill_step_size: Prompt tokens a forward pass.
        conversation: Continue this one; its cache is reused and kept up to date.
    Yields:
        One response a token.
    Raises:
        SpecError: If the prompt or a setting cannot be used.
    """
    sampling = SamplingParams(
        temperature=temp,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias or {},
    )
    if not isinstance(model, LoadedModel):
        model = load(model, drafter, draft_model=draft_model)
        drafter, draft_model = model.drafter, None
    ids = encode_prompt(model.tokenizer, prompt, raw=raw)
    conversation = conversation or Conversation(model.target)
    max_tokens = _fitting(model, len(ids), max_tokens)
    chosen = _chosen_drafter(model, drafter, draft_model, num_draft_tokens)
    cached = conversation.prepare(ids, chosen)
    options = SpeculativeOptions(
        max_new_tokens=max_tokens,
        start_pos=cached,
        sampling=sampling,
        seed=seed,
        rule=rule,
        eos=model.tokenizer.eos_token_ids,
        max_draft_tokens=num_draft_tokens,
        prefill_step=prefill_step_size,
    )
    events = conversation.run(ids, chosen, options)
    turn = _Turn(model.tokenizer, conversation, len(ids), cached, stop)
    return turn.responses(events)


def _chosen_drafter(
    model: LoadedModel,
    drafter: DrafterKind | Drafter | None,
    draft_model: str | Path | None,
    num_draft_tokens: int | None,
) -> Drafter | None:
    if drafter == "auto" and draft_model is None:
        return model.drafter
    if isinstance(drafter, str):
        return make_drafter(
            model, drafter, draft_model=draft_model, num_draft_tokens=num_draft_tokens
        )
    return drafter


def _fitting(model: LoadedModel, num_prompt: int, max_tokens: int) -> int:
    """Return how many tokens there is room for, and check that they fit the memory."""
    context = model.target.max_context
    if context is not None:
        if num_prompt > context:
            raise CapacityError(
                f"the prompt has {num_prompt:,} tokens, the model's context is "
                f"{context:,}",
                "shorten the prompt",
            )
        # The last token generated is never run, so one more than the rest fits.
        max_tokens = min(max_tokens, context - num_prompt + 1)
    model.target.memory_plan.check(num_prompt + max_tokens)
    return max_tokens


def encode_prompt(
    tokenizer: Tokenizer, prompt: Prompt, *, raw: bool = False
) -> list[int]:
    """Turn a prompt into token ids.

    Raises:
        SpecError: If it is empty, or messages meet a model without chat template.
    """
    if not len(prompt):
        raise SpecError("the prompt is empty", "give some text")
    if isinstance(prompt, str):
        if tokenizer.has_chat_template and not raw:
            return encode_messages(tokenizer, [{"role": "user", "content": prompt}])
        begins = tokenizer.bos_token is not None and prompt.startswith(
            tokenizer.bos_token
        )
        ids = tokenizer.encode(prompt, add_special_tokens=not begins)
        if not ids:
            raise SpecError("the prompt has no tokens", "give some text")
        return ids
    if isinstance(prompt[0], Mapping):
        if not tokenizer.has_chat_template:
            raise SpecError(
                "this model has no chat template", "give text instead of messages"
            )
        return encode_messages(tokenizer, prompt)  # type: ignore[arg-type]
    return [int(token) for token in prompt]  # type: ignore[arg-type]


def encode_messages(tokenizer: Tokenizer, messages: Messages) -> list[int]:
    """Put messages into the chat template, ready for the model's answer.

    Raises:
        SpecError: If the template refuses them, for example a system prompt.
    """
    from jinja2 import TemplateError

    conversation = [dict(message) for message in messages]
    try:
        ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
    except TemplateError as error:
        roles = ", ".join(message.get("role", "?") for message in conversation)
        raise SpecError(
            f"the chat template refuses these messages ({roles}): {error}",
            "leave the system prompt out, or the chat template",
        ) from error
    return list(ids)


class _Turn:
    """Turns the events of one run into responses."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        conversation: Conversation,
        num_prompt: int,
        num_cached: int,
        stop: Sequence[str],
    ) -> None:
        self._eos = tokenizer.eos_token_ids
        self._detokenizer = tokenizer.detokenizer
        self._detokenizer.reset()
        self._conversation = conversation
        self._number = conversation.turn
        self._num_prompt = num_prompt
        self._num_cached = num_cached
        self._stop = _StopText(stop)
        self._stats = SpeculativeDecodeResult()
        self._prompt_s = 0.0
        self._generation_s = 0.0

    def responses(self, events: Iterator[RoundEvent]) -> Iterator[GenerationResponse]:
        try:
            for event in self._timed(events):
                event, texts = self._read(event)
                self._stats.observe(event)
                done = self._stats.tokens_generated - len(event.tokens)
                for index, text in enumerate(texts):
                    self._conversation.keep(event.tokens[index], self._number)
                    yield self._response(event, index, text, done + index + 1)
                if event.finish_reason is not None:
                    return
        finally:
            self._conversation.close_turn(self._number)

    def _timed(self, events: Iterator[RoundEvent]) -> Iterator[RoundEvent]:
        """Pass events on, adding up the time it takes to make them and nothing else."""
        while True:
            begin = time.perf_counter()
            event = next(events, None)
            elapsed = time.perf_counter() - begin
            if event is None:
                return
            if event.is_prefill:
                self._prompt_s += elapsed
            else:
                self._generation_s += elapsed
            yield event

    def _read(self, event: RoundEvent) -> tuple[RoundEvent, list[str]]:
        """Return each token's text, and the event cut where a stop text ends it."""
        texts: list[str] = []
        for count, token in enumerate(event.tokens, start=1):
            is_last = event.finish_reason is not None and count == len(event.tokens)
            if token not in self._eos:
                self._detokenizer.add_token(token)
            if is_last:
                self._detokenizer.finalize()
            text, found = self._stop.push(self._detokenizer.last_segment, is_last)
            texts.append(text)
            if found:
                return event.cut(count, "stop"), texts
        return event, texts

    def _response(
        self, event: RoundEvent, index: int, text: str, count: int
    ) -> GenerationResponse:
        is_last = index == len(event.tokens) - 1
        if event.logits is None:
            raise ValueError("the event carries no logits")
        return GenerationResponse(
            text=text,
            token=event.tokens[index],
            from_draft=index < event.accepted,
            prompt_tokens=self._num_prompt,
            cached_tokens=self._num_cached,
            prompt_tps=_rate(self._num_prompt - self._num_cached, self._prompt_s),
            generation_tokens=count,
            # The first token came with the prompt, and so did its time.
            generation_tps=_rate(self._stats.tokens_generated - 1, self._generation_s),
            peak_memory=mx.get_peak_memory() / 1e9,
            cache_bytes=self._conversation.cache.nbytes,
            stats=self._stats,
            finish_reason=event.finish_reason if is_last else None,
            _row=event.logits[index],
        )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


class _StopText:
    """Finds stop texts in a stream, holding back what may be the start of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [text for text in stop if text]
        self._held = ""

    def push(self, text: str, is_last: bool) -> tuple[str, bool]:
        """Take a piece of text; return what can be shown, and whether it ends here."""
        self._held += text
        found = [i for i in (self._held.find(stop) for stop in self._stop) if i >= 0]
        if found:
            return self._held[: min(found)], True
        keep = 0 if is_last else self._possible_start()
        shown, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return shown, False

    def _possible_start(self) -> int:
        """Length of the longest end of the text that begins some stop text."""
        for length in range(len(self._held), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
