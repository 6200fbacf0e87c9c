"""From a folder or repository id to a target, its tokenizer and a drafter.

Everything that cannot work fails here, before the first token.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import mlx.core as mx

from mlx_spec.config import ModelConfig
from mlx_spec.decoder import Decoder
from mlx_spec.draft import Drafter
from mlx_spec.drafters.lookup import PromptLookupDrafter
from mlx_spec.drafters.model import DraftModelDrafter
from mlx_spec.drafters.published import kind_of, load_head_drafter, load_mtp_drafter
from mlx_spec.errors import LoadError, SpecError
from mlx_spec.families import family_of
from mlx_spec.memory import MemoryPlan, wire_memory, working_set_limit
from mlx_spec.weights import CheckpointWeights, canonical_tensors, read_safetensors

DrafterKind = Literal["auto", "none", "lookup", "mtp", "model"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

_REPOSITORY = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_FILES = ["*.json", "model*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja"]
_LOOKUP_NGRAM, _LOOKUP_MIN_NGRAM, _LOOKUP_LENGTH = 6, 2, 10
_MODEL_LENGTH = 4


class Detokenizer(Protocol):
    """Turns ids into text as they come, never splitting a character."""

    @property
    def last_segment(self) -> str:
        """Text that became readable since it was last asked for."""
        ...

    def reset(self) -> None:
        """Start a new text."""
        ...

    def add_token(self, token: int) -> None:
        """Take one more id."""
        ...

    def finalize(self) -> None:
        """Make the rest readable."""
        ...


class Tokenizer(Protocol):
    """The part of mlx-lm's tokenizer wrapper that is used here."""

    @property
    def has_chat_template(self) -> bool:
        """Whether ``apply_chat_template`` works."""
        ...

    @property
    def eos_token_ids(self) -> set[int]:
        """Ids that end an answer."""
        ...

    @property
    def bos_token(self) -> str | None:
        """The text of the token that begins a sequence."""
        ...

    @property
    def detokenizer(self) -> Detokenizer:
        """A new streaming detokenizer."""
        ...

    def add_eos_token(self, token: str) -> None:
        """Let another token end answers."""
        ...

    def get_vocab(self) -> Mapping[str, int]:
        """Every token's id."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Ids to text."""
        ...

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
    ) -> list[int]:
        """Messages to ids."""
        ...


@dataclass(slots=True)
class LoadedModel:
    """A target, its tokenizer and its drafter: what ``generate`` works with.

    Attributes:
        target: The decoder.
        tokenizer: mlx-lm's wrapper of the checkpoint's tokenizer.
        drafter: Proposes tokens; None for plain decoding.
        name: The folder or repository id it was loaded from.
    """

    target: Decoder
    tokenizer: Tokenizer
    drafter: Drafter | None
    name: str


def load(
    model: str | Path,
    drafter: DrafterKind | Drafter | None = "auto",
    *,
    draft_model: str | Path | None = None,
    num_draft_tokens: int | None = None,
    dtype: DtypeName = "auto",
    kv_bits: int | None = None,
    memory_limit: int | None = None,
) -> LoadedModel:
    """Load a checkpoint and its drafter.

    Args:
        model: A folder, or a repository id of the Hugging Face Hub.
        drafter: ``auto`` (the draft model if one is named, else lookup), ``none``,
            ``lookup``, ``mtp`` (the checkpoint's own multi-token prediction layer),
            ``model``, or any drafter object.
        draft_model: Folder or repository id of a drafter that was trained for the model
            (EAGLE-3, DFlash), or of a smaller model of the same vocabulary.
        num_draft_tokens: Tokens a round drafts at most; None for the drafter's own.
        dtype: Of the arithmetic; ``auto`` keeps the checkpoint's on a GPU and takes
            float32 on a CPU, where half precision is slower.
        kv_bits: 8 or 4 to keep the cache quantized.
        memory_limit: Bytes that may be used; None for the device's recommendation.
    Raises:
        LoadError: If the checkpoint or the pair cannot be used.
        CapacityError: If it does not fit the device's memory.
    """
    limit = memory_limit if memory_limit is not None else working_set_limit()
    wire_memory()
    target, tokenizer = _load_pair(model, dtype, kv_bits, limit)
    loaded = LoadedModel(target, tokenizer, None, str(model))
    if isinstance(drafter, str) or draft_model is not None:
        loaded.drafter = make_drafter(
            loaded,
            drafter if isinstance(drafter, str) else "model",
            draft_model=draft_model,
            num_draft_tokens=num_draft_tokens,
            dtype=dtype,
        )
        plan = getattr(loaded.drafter, "memory_plan", None)
        if isinstance(plan, MemoryPlan):
            # The target's caches now leave room for the drafter and its cache.
            target.memory_plan = target.memory_plan.including(plan)
    else:
        loaded.drafter = drafter
    return loaded


def make_drafter(
    loaded: LoadedModel,
    kind: DrafterKind,
    *,
    draft_model: str | Path | None = None,
    num_draft_tokens: int | None = None,
    dtype: DtypeName = "auto",
) -> Drafter | None:
    """Return the drafter of a kind for a loaded target; see ``load``.

    Raises:
        SpecError: If the kind is unknown, or kind and draft_model contradict.
    """
    check_drafter(kind, draft_model, num_draft_tokens)
    if draft_model is not None:
        folder = resolve_folder(draft_model)
        hf = read_config(folder)
        if (published := kind_of(hf)) != "model":
            return load_head_drafter(
                published,
                hf,
                folder,
                loaded.target,
                length=num_draft_tokens,
                dtype=_dtype(dtype),
            )
        plan = loaded.target.memory_plan
        limit = plan.limit_bytes
        left = None if limit is None else limit - plan.weight_bytes
        draft, tokenizer = _load_pair(folder, dtype, None, left)
        pair = LoadedModel(draft, tokenizer, None, str(draft_model))
        length = num_draft_tokens or _MODEL_LENGTH
        return DraftModelDrafter(loaded.tokenizer, pair, length)
    if kind == "none":
        return None
    if kind == "mtp":
        folder = resolve_folder(loaded.name)
        return load_mtp_drafter(
            read_config(folder),
            folder,
            loaded.target,
            length=num_draft_tokens,
            dtype=_dtype(dtype),
        )
    length = num_draft_tokens or _LOOKUP_LENGTH
    return PromptLookupDrafter(_LOOKUP_NGRAM, length, _LOOKUP_MIN_NGRAM)


def check_drafter(
    kind: str, draft_model: str | Path | None, num_draft_tokens: int | None
) -> None:
    """Check settings against each other before anything is loaded.

    Raises:
        SpecError: If the kind is unknown, or kind and draft_model contradict.
    """
    if kind not in get_args(DrafterKind):
        raise SpecError(
            f"drafter {kind!r} is unknown", f"use {', '.join(get_args(DrafterKind))}"
        )
    if num_draft_tokens is not None and num_draft_tokens < 1:
        raise SpecError(
            f"num_draft_tokens is {num_draft_tokens}", "use 1 or more, or drafter none"
        )
    if kind == "model" and draft_model is None:
        raise SpecError("drafter 'model' needs a model", "name it: --draft-model")
    if kind in ("none", "lookup", "mtp") and draft_model is not None:
        raise SpecError(
            f"drafter {kind!r} has no use for the draft model {str(draft_model)!r}",
            "use drafter 'model', or leave the draft model out",
        )


def _load_pair(
    model: str | Path, dtype: DtypeName, kv_bits: int | None, limit: int | None
) -> tuple[Decoder, Tokenizer]:
    folder = resolve_folder(model)
    hf = read_config(folder)
    decoder = load_decoder(folder, dtype=dtype, kv_bits=kv_bits, memory_limit=limit)
    tokenizer = _load_tokenizer(folder, hf)
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= decoder.vocab_size:
        raise LoadError(
            f"the tokenizer of {folder} has token ids up to {largest:,}, but the model "
            f"has {decoder.vocab_size:,} logits",
            "tokenizer and weights do not belong together",
        )
    return decoder, tokenizer


def load_decoder(
    folder: Path,
    *,
    dtype: DtypeName = "auto",
    kv_bits: int | None = None,
    memory_limit: int | None = None,
) -> Decoder:
    """Load the weights of a checkpoint folder into a decoder, without a tokenizer."""
    hf = read_config(folder)
    config = ModelConfig.from_hf(hf)
    tensors = canonical_tensors(
        read_safetensors(folder), family_of(hf), config.num_hidden_layers
    )
    if config.tie_word_embeddings:
        tensors = {k: v for k, v in tensors.items() if not k.startswith("lm_head.")}
    weights = CheckpointWeights(tensors, str(folder), _dtype(dtype))
    decoder = Decoder(config, weights, kv_bits=kv_bits, memory_limit=memory_limit)
    weights.finish()
    decoder.memory_plan.check(1)
    decoder.load_weights()
    return decoder


def _dtype(name: DtypeName) -> mx.Dtype | None:
    if name == "auto":
        return mx.float32 if mx.default_device() == mx.Device(mx.cpu) else None
    dtypes = {
        "float32": mx.float32,
        "bfloat16": mx.bfloat16,
        "float16": mx.float16,
    }
    if name not in dtypes:
        raise SpecError(f"dtype {name!r} is unknown", f"use auto, {', '.join(dtypes)}")
    return dtypes[name]


def resolve_folder(model: str | Path) -> Path:
    """Return the checkpoint's folder, downloading a repository first if need be.

    Raises:
        LoadError: If there is no such folder, file or repository.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise LoadError(f"{folder} is a file", "point at the folder it is in")
    if not isinstance(model, str) or not _REPOSITORY.match(model):
        raise LoadError(f"there is no folder {folder}", "check the path of the model")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=_FILES))
    except (OSError, ValueError, RuntimeError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise LoadError(
            f"there is no folder {model}, and the repository {model} cannot be "
            f"downloaded: {first_line}",
            "check the name and the network, or give a folder",
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json, with the end-of-text ids of generation_config.json.

    Raises:
        LoadError: If config.json is missing or is not a JSON object.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise LoadError(
            f"{folder} is not a checkpoint: it has no config.json",
            "point at the folder that holds config.json and model*.safetensors",
        )
    config = _read_object(file)
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = _read_object(generation).get("eos_token_id")
        config |= {} if eos is None else {"eos_token_id": eos}
    return config


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LoadError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{file} is not a JSON object")
    return value


def _load_tokenizer(folder: Path, hf: Mapping[str, Any]) -> Tokenizer:
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise LoadError(
            f"{folder} has no tokenizer",
            f"it needs one of {', '.join(_TOKENIZER_FILES)}",
        )
    from mlx_lm import tokenizer_utils

    eos = hf.get("eos_token_id")
    try:
        tokenizer: Tokenizer = tokenizer_utils.load(
            folder, {"trust_remote_code": False}, eos_token_ids=eos
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise LoadError(f"the tokenizer of {folder} cannot be read: {error}") from error
    return tokenizer


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
