"""The library as the command sees it, imported when it is first used."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from mlx_spec_app.request import LoadRequest, Request

if TYPE_CHECKING:
    from mlx_spec.conversation import Conversation
    from mlx_spec.generation import GenerationResponse, Prompt
    from mlx_spec.loading import LoadedModel


class Backend(Protocol):
    """Loads a model and lets it answer."""

    def load(self, request: LoadRequest) -> "LoadedModel":
        """Load the model and its drafter."""
        ...

    def new_conversation(self, model: "LoadedModel") -> "Conversation":
        """Begin a conversation.

        Raises:
            LoadError: If the model has no chat template to put messages into.
        """
        ...

    def answer(
        self,
        model: "LoadedModel",
        prompt: "Prompt",
        request: Request,
        conversation: "Conversation | None",
    ) -> "Iterator[GenerationResponse]":
        """Generate an answer token by token."""
        ...


class LibraryBackend:
    """The real one."""

    def load(self, request: LoadRequest) -> "LoadedModel":
        from mlx_spec.loading import load

        model = load(
            request.model,
            request.drafter,
            draft_model=request.draft_model,
            num_draft_tokens=request.num_draft_tokens,
            dtype=request.dtype,
            kv_bits=request.kv_bits,
        )
        for token in request.extra_eos_tokens:
            _add_eos_token(model, token)
        return model

    def new_conversation(self, model: "LoadedModel") -> "Conversation":
        from mlx_spec.conversation import Conversation
        from mlx_spec.errors import LoadError

        if not model.tokenizer.has_chat_template:
            raise LoadError(
                f"{model.name} has no chat template",
                "it completes text: use mlx-spec generate, or choose a chat model",
            )
        return Conversation(model.target)

    def answer(
        self,
        model: "LoadedModel",
        prompt: "Prompt",
        request: Request,
        conversation: "Conversation | None",
    ) -> "Iterator[GenerationResponse]":
        from mlx_spec.generation import stream_generate

        sampling = request.sampling
        return stream_generate(
            model,
            prompt,
            num_draft_tokens=request.load.num_draft_tokens,
            max_tokens=request.max_tokens,
            temp=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=request.seed,
            rule=request.rule,
            stop=request.stop,
            raw=request.raw,
            prefill_step_size=request.prefill_step_size,
            conversation=conversation,
        )


def _add_eos_token(model: "LoadedModel", token: str) -> None:
    from mlx_spec.errors import LoadError

    # Asked for a word it does not have, a tokenizer may answer with its unknown token.
    if token not in model.tokenizer.get_vocab():
        raise LoadError(
            f"the tokenizer has no token {token!r}", "change --extra-eos-token"
        )
    model.tokenizer.add_eos_token(token)
