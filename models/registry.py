"""Models of the Hugging Face Hub that the decoder reads, and which fit a machine."""

import os
from dataclasses import dataclass

_WEIGHT_SHARE = 0.8  # the rest is for the cache and activations


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A published target.

    Attributes:
        name: What to call it.
        repository: Its id on the Hub.
        weight_bytes: Bytes of its weights.
        draft_model: A smaller model of the same vocabulary, if one is known.
        drafter: A head trained to draft for it, if one is known.
    """

    name: str
    repository: str
    weight_bytes: int
    draft_model: str | None = None
    drafter: str | None = None


def _gb(size: float) -> int:
    return round(size * 1e9)


# Best first: larger before smaller, but no model before one that outdoes it.
KNOWN_MODELS = (
    KnownModel(
        name="GLM-4.7 4-bit",
        repository="mlx-community/GLM-4.7-4bit",
        weight_bytes=_gb(200),
    ),
    KnownModel(
        name="Qwen3-235B-A22B 4-bit",
        repository="mlx-community/Qwen3-235B-A22B-4bit",
        weight_bytes=_gb(132),
        draft_model="mlx-community/Qwen3-0.6B-4bit",
    ),
    KnownModel(
        name="gpt-oss-120b",
        repository="mlx-community/gpt-oss-120b-MXFP4-Q4",
        weight_bytes=_gb(66),
        draft_model="mlx-community/gpt-oss-20b-MXFP4-Q4",
        drafter="lmsys/EAGLE3-gpt-oss-120b-bf16",
    ),
    KnownModel(
        name="GLM-4.5-Air 4-bit",
        repository="mlx-community/GLM-4.5-Air-4bit",
        weight_bytes=_gb(60),
    ),
    KnownModel(
        name="GLM-4.5-Air 3-bit",
        repository="mlx-community/GLM-4.5-Air-3bit",
        weight_bytes=_gb(47),
    ),
    KnownModel(
        name="Qwen3-30B-A3B 4-bit",
        repository="mlx-community/Qwen3-30B-A3B-4bit",
        weight_bytes=_gb(17.2),
        draft_model="mlx-community/Qwen3-0.6B-4bit",
        drafter="AngelSlim/Qwen3-a3B_eagle3",
    ),
    KnownModel(
        name="Qwen3-Coder-30B-A3B 4-bit",
        repository="mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit",
        weight_bytes=_gb(17.2),
        draft_model="mlx-community/Qwen3-0.6B-4bit",
    ),
    KnownModel(
        name="gpt-oss-20b",
        repository="mlx-community/gpt-oss-20b-MXFP4-Q8",
        weight_bytes=_gb(12.1),
        drafter="RedHatAI/gpt-oss-20b-speculator.eagle3",
    ),
    KnownModel(
        name="Mixtral-8x7B 4-bit",
        repository="mlx-community/Mixtral-8x7B-Instruct-v0.1-4bit",
        weight_bytes=_gb(26.3),
    ),
    KnownModel(
        name="Qwen1.5-MoE-A2.7B 4-bit",
        repository="mlx-community/Qwen1.5-MoE-A2.7B-Chat-4bit",
        weight_bytes=_gb(8),
    ),
    KnownModel(
        name="OLMoE-1B-7B 4-bit",
        repository="mlx-community/OLMoE-1B-7B-0125-Instruct-4bit",
        weight_bytes=_gb(3.9),
        drafter="wantsleep/OLMoE_1B_7B_Eagle3",
    ),
)


def suggestions(memory_bytes: int) -> list[KnownModel]:
    """Return the known models that fit, with room for a cache, best first."""
    limit = _WEIGHT_SHARE * memory_bytes
    return [model for model in KNOWN_MODELS if model.weight_bytes <= limit]


def usable_memory() -> int:
    """Bytes a model and its cache may take on this machine.

    That is what the device recommends, or all memory where it does not say.
    """
    from mlx_spec.memory import working_set_limit

    limit = working_set_limit()
    if limit is not None:
        return limit
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
