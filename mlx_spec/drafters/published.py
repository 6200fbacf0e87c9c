"""From a drafter's folder to a drafter: what kind it is shows in its config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from mlx_spec.drafters.block import BlockDrafter
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.dflash import DFlashNetwork
from mlx_spec.drafters.dspark import DSparkNetwork
from mlx_spec.drafters.eagle3 import Eagle3Head
from mlx_spec.drafters.mtp import MTPHead
from mlx_spec.target import FeatureTarget
from mlx_spec.weights import read_safetensors

PublishedKind = Literal["model", "eagle3", "dflash", "dspark"]
_EAGLE3_LENGTH, _MTP_LENGTH = 4, 3


def kind_of(hf: Mapping[str, Any]) -> PublishedKind:
    """Tell from config.json what kind of drafter a folder holds.

    A folder that is no drafter's is an ordinary model, which can draft as well.
    """
    names = " ".join(hf.get("architectures") or ()).lower()
    special = hf.get("dflash_config") or {}
    names += f" {hf.get('speculators_model_type')} {special.get('projector_type')}"
    if "dspark" in names:
        return "dspark"
    if special or "dflash" in names:
        return "dflash"
    return "eagle3" if "eagle3" in names else "model"


def load_head_drafter(
    kind: Literal["eagle3", "dflash", "dspark"],
    hf: Mapping[str, Any],
    folder: Path,
    target: FeatureTarget,
    *,
    length: int | None = None,
    dtype: mx.Dtype | None = None,
    quantize: int | None = None,
) -> ChainDrafter | BlockDrafter:
    """Load a drafter that was made for this target.

    Args:
        kind: What ``kind_of`` said of it.
        hf: Its config.json.
        folder: Where it is.
        target: The target it is for.
        length: Tokens a round drafts at most; None for the drafter's own.
        dtype: Of the arithmetic; None keeps the checkpoint's.
        quantize: 4 or 8 to pack its matrices when they are loaded; norms, routers and
            low-rank heads stay as they are. None leaves all as it is.
    Raises:
        LoadError: If it is damaged or made for another target.
        SpecError: If ``quantize`` is another number.
    """
    tensors, source = read_safetensors(folder), str(folder)
    if kind == "eagle3":
        head = Eagle3Head(hf, tensors, source, target, dtype, quantize)
        return ChainDrafter(head, target.vocab_size, length or _EAGLE3_LENGTH)
    made = DSparkNetwork if kind == "dspark" else DFlashNetwork
    network = made(hf, tensors, source, target, dtype, quantize)
    return BlockDrafter(network, target.vocab_size, length)


def load_mtp_drafter(
    hf: Mapping[str, Any],
    folder: Path,
    target: FeatureTarget,
    *,
    length: int | None = None,
    dtype: mx.Dtype | None = None,
    quantize: int | None = None,
) -> ChainDrafter:
    """Load the multi-token prediction layer of the target's own checkpoint.

    For the arguments see ``load_head_drafter``.

    Raises:
        LoadError: If the checkpoint has none, or a part of it is missing.
    """
    tensors = read_safetensors(folder)
    head = MTPHead(hf, tensors, str(folder), target, dtype, quantize)
    return ChainDrafter(head, target.vocab_size, length or _MTP_LENGTH)
