"""Lossless speculative decoding of mixture-of-experts language models on MLX.

The public names are loaded when they are first used: importing this package is fast,
and mlx-lm and transformers are imported when a checkpoint is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from mlx_spec._version import __version__

if TYPE_CHECKING:
    from mlx_spec.cache import KVCache, ModelCache
    from mlx_spec.config import ModelConfig
    from mlx_spec.conversation import Conversation
    from mlx_spec.decoder import Decoder
    from mlx_spec.draft import DraftBlock, DraftDist, Drafter
    from mlx_spec.drafters.lookup import PromptLookupDrafter
    from mlx_spec.drafters.model import DraftModelDrafter
    from mlx_spec.errors import CapacityError, LoadError, SpecError
    from mlx_spec.generation import GenerationResponse, generate, stream_generate
    from mlx_spec.loading import LoadedModel, load
    from mlx_spec.sampling import Sampler, SamplingParams, sampling_distribution
    from mlx_spec.speculative import (
        SpeculativeOptions,
        speculative_decode,
        speculative_decode_with,
        speculative_stream,
    )
    from mlx_spec.stats import RoundEvent, SpeculativeDecodeResult
    from mlx_spec.verify import accept_or_resample, verify_block

_MODULES = {
    "CapacityError": "errors",
    "Conversation": "conversation",
    "Decoder": "decoder",
    "DraftBlock": "draft",
    "DraftDist": "draft",
    "DraftModelDrafter": "drafters.model",
    "Drafter": "draft",
    "GenerationResponse": "generation",
    "KVCache": "cache",
    "LoadError": "errors",
    "LoadedModel": "loading",
    "ModelCache": "cache",
    "ModelConfig": "config",
    "PromptLookupDrafter": "drafters.lookup",
    "RoundEvent": "stats",
    "Sampler": "sampling",
    "SamplingParams": "sampling",
    "SpecError": "errors",
    "SpeculativeDecodeResult": "stats",
    "SpeculativeOptions": "speculative",
    "accept_or_resample": "verify",
    "generate": "generation",
    "load": "loading",
    "sampling_distribution": "sampling",
    "speculative_decode": "speculative",
    "speculative_decode_with": "speculative",
    "speculative_stream": "speculative",
    "stream_generate": "generation",
    "verify_block": "verify",
}

__all__ = [
    "CapacityError",
    "Conversation",
    "Decoder",
    "DraftBlock",
    "DraftDist",
    "DraftModelDrafter",
    "Drafter",
    "GenerationResponse",
    "KVCache",
    "LoadError",
    "LoadedModel",
    "ModelCache",
    "ModelConfig",
    "PromptLookupDrafter",
    "RoundEvent",
    "Sampler",
    "SamplingParams",
    "SpecError",
    "SpeculativeDecodeResult",
    "SpeculativeOptions",
    "__version__",
    "accept_or_resample",
    "generate",
    "load",
    "sampling_distribution",
    "speculative_decode",
    "speculative_decode_with",
    "speculative_stream",
    "stream_generate",
    "verify_block",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'mlx_spec' has no attribute {name!r}")
    value = getattr(import_module(f"mlx_spec.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
