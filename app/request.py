"""What the user asked for, checked before anything slow begins."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_spec_models.embedded import EMBEDDED_NAME

if TYPE_CHECKING:
    from mlx_spec.loading import DrafterKind, DtypeName
    from mlx_spec.sampling import SamplingParams
    from mlx_spec.speculative import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """Which model and drafter to load; see ``mlx_spec.load``.

    Attributes:
        is_embedded: Whether none was named, and ``model`` is the one installed here.
    """

    model: str
    is_embedded: bool = False
    drafter: "DrafterKind" = "auto"
    draft_model: str | None = None
    num_draft_tokens: int | None = None
    dtype: "DtypeName" = "auto"
    kv_bits: int | None = None
    extra_eos_tokens: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The model's name as it is shown."""
        return EMBEDDED_NAME if self.is_embedded else self.model


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """How to answer; see ``mlx_spec.stream_generate``."""

    load: LoadRequest
    sampling: "SamplingParams"
    max_tokens: int
    seed: int = 0
    rule: "Rule" = "rejection"
    system_prompt: str | None = None
    stop: tuple[str, ...] = ()
    raw: bool = False
    prefill_step_size: int = 2048

    def messages(self, history: list[dict[str, str]]) -> list[dict[str, str]]:
        """Put the system prompt, if there is one, before the messages so far."""
        if self.system_prompt is None:
            return list(history)
        return [{"role": "system", "content": self.system_prompt}, *history]
