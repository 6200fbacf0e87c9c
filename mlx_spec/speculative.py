"""The round loop: draft, verify, accept, roll back, emit.

Token ids in, token ids out. It knows no tokenizer, does no I/O and takes no times.
The last token of a run is always an anchor: decided, but not in the cache. So on
return the cache holds the context, the prompt and every generated token but the
last, and a second call that starts with that token continues the first.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import mlx.core as mx

from mlx_spec.cache import ModelCache
from mlx_spec.draft import DraftBlock, Drafter, FeatureDrafter, SamplingDrafter
from mlx_spec.errors import SpecError
from mlx_spec.sampling import (
    GREEDY,
    Purpose,
    Sampler,
    SamplingParams,
    block_contexts,
    distribution_rows,
    processed_logits,
)
from mlx_spec.stats import FinishReason, RoundEvent, SpeculativeDecodeResult
from mlx_spec.target import Features, FeatureTarget, Target
from mlx_spec.verify import Verdict, match_block, verify_block

_CLEAR_EVERY = 256  # tokens; freed buffers of outgrown caches go back to the system

Rule = Literal["rejection", "coupled"]


@dataclass(frozen=True, slots=True)
class SpeculativeOptions:
    """What a run generates, and how.

    Attributes:
        max_new_tokens: Number of tokens to generate at most; the end of the target's
            context ends a run like this, too.
        start_pos: Position of the prompt's first token: the length of the cache.
        sampling: How the target's tokens are chosen.
        seed: Seed of all draws.
        rule: ``rejection`` keeps the distribution; ``coupled`` also gives the same
            tokens for the same seed with any drafter, or none.
        eos: Token ids that end the run; the one met is emitted.
        stop: Token sequences that end the run; the one met is emitted.
        max_draft_tokens: Tokens a round drafts at most, None to let the drafter say.
        prefill_step: Prompt tokens a forward pass.
    """

    max_new_tokens: int = 256
    start_pos: int = 0
    sampling: SamplingParams = GREEDY
    seed: int = 0
    rule: Rule = "rejection"
    eos: Collection[int] = ()
    stop: Sequence[Sequence[int]] = ()
    max_draft_tokens: int | None = None
    prefill_step: int = 2048

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise SpecError(f"max_new_tokens is {self.max_new_tokens}", "use 0 or more")
        if self.rule not in ("rejection", "coupled"):
            raise SpecError(f"rule is {self.rule!r}", "use 'rejection' or 'coupled'")
        if self.prefill_step < 1:
            raise SpecError(f"prefill_step is {self.prefill_step}", "use 1 or more")
        if self.max_draft_tokens is not None and self.max_draft_tokens < 0:
            raise SpecError(
                f"max_draft_tokens is {self.max_draft_tokens}", "use 0 or more"
            )


def speculative_decode(
    target: Target,
    prompt: Sequence[int],
    drafter: Drafter | None = None,
    options: SpeculativeOptions = SpeculativeOptions(),
) -> SpeculativeDecodeResult:
    """Generate from a prompt, with a cache of its own; see ``speculative_stream``."""
    return speculative_decode_with(target, target.new_cache(), prompt, drafter, options)


def speculative_decode_with(
    target: Target,
    cache: ModelCache,
    prompt: Sequence[int],
    drafter: Drafter | None = None,
    options: SpeculativeOptions = SpeculativeOptions(),
    *,
    context: Sequence[int] = (),
) -> SpeculativeDecodeResult:
    """Generate from a prompt and a given cache; see ``speculative_stream``."""
    result = SpeculativeDecodeResult()
    for event in speculative_stream(
        target, cache, prompt, drafter, options, context=context
    ):
        result.observe(event)
    return result


def speculative_stream(
    target: Target,
    cache: ModelCache,
    prompt: Sequence[int],
    drafter: Drafter | None = None,
    options: SpeculativeOptions = SpeculativeOptions(),
    *,
    context: Sequence[int] = (),
) -> Iterator[RoundEvent]:
    """Generate token by token, or block by block where a drafter guesses right.

    Args:
        target: The model whose distribution is preserved.
        cache: Its cache, holding ``options.start_pos`` tokens. Whenever an event is
            out, it holds everything but the last emitted token.
        prompt: Tokens to run first, at least one.
        drafter: Proposes tokens; None for plain decoding.
        options: What to generate.
        context: The tokens the cache holds, for penalties and the drafter. May be
            left out; penalties and drafter then begin at the prompt.
    Yields:
        One event for the prefill and one a round.
    Raises:
        SpecError: If the prompt is empty, or start_pos is not the cache's length.
    """
    if not len(prompt):
        raise SpecError("the prompt is empty", "give at least one token")
    if options.start_pos != cache.seq_len:
        raise SpecError(
            f"start_pos is {options.start_pos}, but the cache holds "
            f"{cache.seq_len} tokens",
            "pass the cache's seq_len, or a new cache",
        )
    if context and len(context) != options.start_pos:
        raise SpecError(
            f"the context has {len(context)} tokens, but start_pos is "
            f"{options.start_pos}",
            "pass every token that the cache holds, or none",
        )
    foreign = [t for t in options.sampling.logit_bias if t >= target.vocab_size]
    if foreign:
        raise SpecError(
            f"logit_bias names token {foreign[0]}, the model has tokens 0 to "
            f"{target.vocab_size - 1}"
        )
    if options.max_new_tokens == 0:
        return iter(())
    unseen = options.start_pos - len(context)
    if target.max_context is not None:
        # The last token is never run, so one more than the rest of the context fits.
        room = target.max_context - options.start_pos - len(prompt) + 1
        options = replace(
            options, max_new_tokens=min(options.max_new_tokens, max(room, 1))
        )
    run = _Run(cache, [*context, *prompt], unseen, options, target.vocab_size)
    if drafter is None:
        return _plain_rounds(target, cache, prompt, run)
    return _speculative_rounds(target, cache, prompt, drafter, run)


def _speculative_rounds(
    target: Target,
    cache: ModelCache,
    prompt: Sequence[int],
    drafter: Drafter,
    run: "_Run",
) -> Iterator[RoundEvent]:
    window = _Window(target, drafter, run)
    row, hidden = window.prefill(prompt, cache)
    block = DraftBlock.empty()
    verdict = run.decide(row[None], block)
    yield replace(run.settle(row[None], block, verdict), is_prefill=True)
    while run.finish_reason is None:
        block = run.draft(drafter, hidden)
        # The run's own position: a cache that somebody else changed is refused.
        rows, position = run.rows(block), run.cached_length
        logits, hiddens = window.forward(rows, position, cache)
        verdict = run.decide(logits, block)
        try:
            event = run.settle(logits, block, verdict)
        finally:
            cache.truncate(run.cached_length)
        hidden = hiddens[len(event.tokens) - 1]
        window.show(len(event.tokens))
        yield event


def _plain_rounds(
    target: Target, cache: ModelCache, prompt: Sequence[int], run: "_Run"
) -> Iterator[RoundEvent]:
    """Rounds without drafts; the next forward is under way while a token is read."""
    start, step = run.options.start_pos, run.options.prefill_step
    row, _ = target.prefill(prompt, start, cache, step)
    logits, nothing = row[None], DraftBlock.empty()
    verdict = run.decide(logits, nothing)
    is_prefill = True
    while True:
        held = run.cached_length + 1
        current_logits, current = logits, verdict
        if run.remaining > 1:
            token = current[1:]
            logits, _ = target.forward_batch_with_hidden(token, held, cache)
            verdict = run.decide(logits, nothing, pending=token)
            # The current verdict first: reading it must not wait for the next one.
            mx.async_eval(current, verdict)
        event = run.settle(current_logits, nothing, current)
        cache.truncate(held)
        yield replace(event, is_prefill=is_prefill)
        if run.finish_reason is not None:
            return
        cache.reveal(held + 1)
        is_prefill = False


class _Window:
    """Runs the target, and lets a drafter that asks for it look inside."""

    def __init__(self, target: Target, drafter: Drafter, run: "_Run") -> None:
        self._target = target
        self._run = run
        self._drafter = drafter if isinstance(drafter, FeatureDrafter) else None
        self._features: Features | None = None

    def prefill(
        self, prompt: Sequence[int], cache: ModelCache
    ) -> tuple[mx.array, mx.array]:
        start, step = self._run.options.start_pos, self._run.options.prefill_step
        drafter = self._drafter
        if drafter is None:
            return self._target.prefill(prompt, start, cache, step)
        target: FeatureTarget = self._target  # type: ignore[assignment]
        return target.prefill(
            prompt,
            start,
            cache,
            step,
            taps=drafter.taps,
            observer=self._show,
        )

    def forward(
        self, rows: mx.array, position: int, cache: ModelCache
    ) -> tuple[mx.array, mx.array]:
        if self._drafter is None:
            return self._target.forward_batch_with_hidden(rows, position, cache)
        target: FeatureTarget = self._target  # type: ignore[assignment]
        result = target.forward(rows, position, cache, taps=self._drafter.taps)
        self._features = Features(position, result.hidden, result.taps)
        return result.logits, result.hidden

    def show(self, count: int) -> None:
        """Show the first rows of the last forward pass: their tokens are committed."""
        if self._features is not None:
            self._show(self._features.part(0, count))

    def _show(self, features: Features) -> None:
        if self._drafter is not None:
            position = features.position - self._run.num_unseen
            moved = features._replace(position=position)
            self._drafter.observe(self._run.history, moved)


def _packed(verdict: Verdict, block: DraftBlock) -> mx.array:
    """One small array of all that the host needs to know of a round."""
    parts = [verdict.num_accepted[None], verdict.next_token[None]]
    return mx.concatenate([*parts, block.token_array])


class _Run:
    """The committed tokens of one run and what is decided about the next ones."""

    def __init__(
        self,
        cache: ModelCache,
        history: list[int],
        num_unseen: int,
        options: SpeculativeOptions,
        vocab_size: int,
    ) -> None:
        self.options = options
        self.finish_reason: FinishReason | None = None
        self.remaining = options.max_new_tokens
        self.history = history
        self._vocab_size = vocab_size
        self._max_rollback = cache.max_rollback
        self._num_given = self._cleared_at = len(history)
        self._sampler = Sampler(options.seed)
        # The history may lack the context; positions are absolute all the same.
        self.num_unseen = num_unseen

    @property
    def cached_length(self) -> int:
        """Length of the cache when all committed tokens but the last are in it."""
        return self.num_unseen + len(self.history) - 1

    def draft(self, drafter: Drafter, hidden: mx.array) -> DraftBlock:
        """Ask for a block, one short of what remains: the last token is an anchor."""
        limits = (
            self.remaining - 1,
            self.options.max_draft_tokens,
            self._max_rollback,
        )
        budget = min(limit for limit in limits if limit is not None)
        if budget == 0:
            return DraftBlock.empty()
        if isinstance(drafter, SamplingDrafter):
            # Each round: other runs may share the drafter.
            sampling, seed = self.options.sampling, self.options.seed
            is_coupled = self.options.rule == "coupled"
            drafter.follow(sampling, seed, is_coupled, self._vocab_size)
        block = drafter.propose(self.history, hidden, budget).truncate(budget)
        block.check(self._vocab_size)
        return block

    def rows(self, block: DraftBlock) -> mx.array:
        """Return the verification batch [anchor, d1 … dK], (K + 1,) int32."""
        anchor = mx.array(self.history[-1:], mx.int32)
        if not len(block):
            return anchor
        return mx.concatenate([anchor, self._in_range(block)])

    def _in_range(self, block: DraftBlock) -> mx.array:
        """Return the drafts, none of which indexes outside an array of V rows.

        What the host has not seen yet is refused only when it is read.
        """
        return mx.clip(block.token_array, 0, self._vocab_size - 1).astype(mx.int32)

    def decide(
        self, logits: mx.array, block: DraftBlock, pending: mx.array | None = None
    ) -> mx.array:
        """Judge a block by the target's rows, on the device.

        Args:
            logits: (K + 1, V).
            block: K drafted tokens.
            pending: (1,) a committed token that the host has not read yet.
        Returns:
            (2 + K,) int32: number accepted, next token, drafted tokens.
        """
        options, sampling = self.options, self.options.sampling
        ahead = 0 if pending is None else 1
        after = block.token_array if pending is None else pending
        contexts = block_contexts(self.history, after, sampling)
        if contexts is not None:
            contexts = contexts[ahead:]
        if sampling.is_greedy or options.rule == "coupled":
            scores = processed_logits(logits, sampling, contexts)
            if not sampling.is_greedy:
                scores = scores + self._noise(logits.shape, ahead)
            samples = mx.argmax(scores, axis=-1).astype(mx.int32)
            verdict = match_block(samples, block.token_array)
        else:
            p = distribution_rows(logits, sampling, contexts)
            q = block.q_rows(logits.shape[-1])
            accept = self._draws(Purpose.ACCEPT, len(block), ahead)
            chosen = self._draws(Purpose.NEXT, len(block) + 1, ahead)
            verdict = verify_block(p, self._in_range(block), q, accept, chosen)
        return _packed(verdict, block)

    def settle(
        self, logits: mx.array, block: DraftBlock, verdict: mx.array
    ) -> RoundEvent:
        """Read the verdict (the round's one wait for the device) and commit."""
        values: list[int] = verdict.tolist()  # type: ignore[assignment]
        num_accepted, next_token, *drafted = values
        block.resolve(drafted)
        block.check(self._vocab_size)
        tokens = self._commit([*drafted[:num_accepted], next_token])
        if len(self.history) - self._cleared_at >= _CLEAR_EVERY:
            mx.clear_cache()
            self._cleared_at = len(self.history)
        return RoundEvent(
            tokens=tuple(tokens),
            drafted=len(drafted),
            accepted=min(num_accepted, len(tokens)),
            evaluated=min(num_accepted + 1, len(drafted), len(tokens)),
            finish_reason=self.finish_reason,
            logits=logits[: len(tokens)],
        )

    def _commit(self, tokens: list[int]) -> list[int]:
        """Append tokens up to the first that ends the run; return those."""
        for count, token in enumerate(tokens, start=1):
            self.history.append(token)
            self.remaining -= 1
            if token in self.options.eos or self._ends_with_stop():
                self.finish_reason = "stop"
                return tokens[:count]
        if self.remaining == 0:
            self.finish_reason = "length"
        return tokens

    def _ends_with_stop(self) -> bool:
        generated = len(self.history) - self._num_given
        return any(
            0 < len(stop) <= generated and self.history[-len(stop) :] == list(stop)
            for stop in self.options.stop
        )

    def _positions(self, count: int, ahead: int) -> range:
        first = self.num_unseen + len(self.history) + ahead
        return range(first, first + count)

    def _draws(self, purpose: Purpose, count: int, ahead: int) -> mx.array:
        positions = self._positions(count, ahead)
        values = [self._sampler.uniform_at(p, purpose) for p in positions]
        return mx.array(values, mx.float32)

    def _noise(self, shape: tuple[int, ...], ahead: int) -> mx.array:
        positions = self._positions(shape[0], ahead)
        return self._sampler.gumbel_at(positions, Purpose.TARGET, shape[1])
