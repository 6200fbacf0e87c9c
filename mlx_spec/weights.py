"""Where a decoder's weights come from: a checkpoint folder, or a seed.

The decoder asks for every tensor by canonical name and shape; ``CheckpointWeights``
answers from safetensors files (plain or quantized, per-expert names stacked),
``RandomWeights`` from a seed. Both give the same layer objects.
"""

import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import mlx.core as mx

from mlx_spec.errors import LoadError, SpecError
from mlx_spec.families import Family
from mlx_spec.layers import (
    Embedding,
    ExpertLinear,
    ExpertProjection,
    Linear,
    Projection,
    Quantization,
    QuantizedEmbedding,
    QuantizedExpertLinear,
    QuantizedLinear,
)
from mlx_spec.tensor_file import Tensors, read_tensors

Shape = tuple[int, ...]

_GROUP_SIZES = (64, 32)
_ROUTERS = (".mlp.gate", ".mlp.shared_expert_gate")


class Weights(Protocol):
    """What the decoder asks for while it is built."""

    @property
    def arrays(self) -> list[mx.array]:
        """Every array handed out so far."""
        ...

    def tensor(self, name: str, shape: Shape) -> mx.array:
        """Return one plain tensor."""
        ...

    def linear(self, name: str, out: int, width: int, bias: bool) -> Projection:
        """Return the projection ``name`` from ``width`` to ``out`` features."""
        ...

    def embedding(
        self, name: str, rows: int, width: int
    ) -> Embedding | QuantizedEmbedding:
        """Return a table of ``rows`` vectors of ``width`` features."""
        ...

    def experts(
        self, name: str, count: int, out: int, width: int, bias: bool
    ) -> ExpertProjection:
        """Return ``count`` stacked projections from ``width`` to ``out``."""
        ...


class RandomWeights:
    """Reproducible random weights: each tensor depends on the seed and its name."""

    def __init__(self, seed: int, dtype: mx.Dtype = mx.float32) -> None:
        self._seed = seed
        self._dtype = dtype
        self.arrays: list[mx.array] = []

    def tensor(self, name: str, shape: Shape) -> mx.array:
        value = self._draw(name, shape)
        self.arrays.append(value)
        return value

    def _draw(self, name: str, shape: Shape) -> mx.array:
        if "norm" in name:
            return mx.ones(shape, self._dtype)
        key = mx.random.key((self._seed << 32) | zlib.crc32(name.encode()))
        scale = 1.0 if "embed" in name or len(shape) == 1 else shape[-1] ** -0.5
        return mx.random.normal(shape, self._dtype, scale=scale, key=key)

    def linear(self, name: str, out: int, width: int, bias: bool) -> Projection:
        offset = self.tensor(f"{name}.bias", (out,)) if bias else None
        return Linear(self.tensor(f"{name}.weight", (out, width)), offset)

    def embedding(self, name: str, rows: int, width: int) -> Embedding:
        return Embedding(self.tensor(f"{name}.weight", (rows, width)))

    def experts(
        self, name: str, count: int, out: int, width: int, bias: bool
    ) -> ExpertProjection:
        offset = self.tensor(f"{name}.bias", (count, out)) if bias else None
        return ExpertLinear(self.tensor(f"{name}.weight", (count, out, width)), offset)


class CheckpointWeights:
    """Tensors of a checkpoint under canonical names, each handed out once.

    Args:
        tensors: Emptied while they are handed out.
        source: Where they are from, for messages.
        dtype: Of the arithmetic; None keeps the checkpoint's.
        quantize: 4 or 8 to pack linear maps, embeddings and experts that are not yet;
            None leaves them as they are. Routers always stay as they are.
    Raises:
        SpecError: If ``quantize`` is another number.
    """

    def __init__(
        self,
        tensors: Tensors,
        source: str,
        dtype: mx.Dtype | None,
        quantize: int | None = None,
    ) -> None:
        if quantize not in (None, 4, 8):
            raise SpecError(f"quantize is {quantize}", "use 4 or 8, or leave it out")
        self._tensors = tensors
        self._source = source
        self._dtype = dtype
        self._bits = quantize
        self.arrays: list[mx.array] = []

    def has(self, name: str) -> bool:
        """Whether a tensor is there and was not handed out yet."""
        return name in self._tensors

    def _take(self, name: str) -> mx.array:
        if name not in self._tensors:
            raise LoadError(
                f"{self._source} has no tensor {name!r}",
                "the checkpoint is incomplete, or its config.json is of another model",
            )
        value = self._tensors.pop(name)
        is_exempt = name.endswith("e_score_correction_bias")  # stays float32
        if (
            self._dtype is not None
            and mx.issubdtype(value.dtype, mx.floating)
            and not is_exempt
        ):
            value = value.astype(self._dtype)
        self.arrays.append(value)
        return value

    def _take_optional(self, name: str) -> mx.array | None:
        return self._take(name) if name in self._tensors else None

    def _expect(self, name: str, found: Shape, shape: Shape) -> None:
        if found != shape:
            raise LoadError(
                f"tensor {name!r} has shape {found}, but config.json asks for {shape}",
                f"config.json and weights of {self._source} do not belong together",
            )

    def tensor(self, name: str, shape: Shape) -> mx.array:
        value = self._take(name)
        self._expect(name, tuple(value.shape), shape)
        return value

    def _matrix(
        self, name: str, shape: Shape
    ) -> tuple[mx.array, mx.array | None, mx.array | None, Quantization | None]:
        """Return weight, scales, biases and packing of one (stacked) matrix."""
        weight = self._take(f"{name}.weight")
        scales = self._take_optional(f"{name}.scales")
        if scales is None:
            self._expect(f"{name}.weight", tuple(weight.shape), shape)
            return self._packed(name, weight)
        biases = self._take_optional(f"{name}.biases")
        self._expect(f"{name}.weight", tuple(weight.shape[:-1]), shape[:-1])
        packing = self._packing(name, weight, scales, shape[-1])
        return weight, scales, biases, packing

    def _packed(
        self, name: str, weight: mx.array
    ) -> tuple[mx.array, mx.array | None, mx.array | None, Quantization | None]:
        """Quantize a matrix that was handed out last, if it is to be and can be."""
        group = next((g for g in _GROUP_SIZES if weight.shape[-1] % g == 0), None)
        if self._bits is None or group is None or name.endswith(_ROUTERS):
            return weight, None, None, None
        packing = Quantization(group, self._bits)
        weight, scales, biases = mx.quantize(weight, group, self._bits)
        self.arrays[-1:] = [weight, scales, biases]
        return weight, scales, biases, packing

    def _packing(
        self, name: str, weight: mx.array, scales: mx.array, width: int
    ) -> Quantization:
        """Infer the packing from the shapes: no list of exceptions is needed."""
        bits = weight.shape[-1] * 32 // width
        group_size = width // scales.shape[-1]
        if scales.dtype != mx.uint8:
            return Quantization(group_size, bits)
        match bits, group_size:
            case 4, 32:
                return Quantization(32, 4, "mxfp4")
            case 4, 16:
                return Quantization(16, 4, "nvfp4")
            case 8, 32:
                return Quantization(32, 8, "mxfp8")
        raise LoadError(
            f"tensor {name!r} is packed with {bits} bits in groups of {group_size}",
            "supported without biases: mxfp4, mxfp8, nvfp4",
        )

    def linear(self, name: str, out: int, width: int, bias: bool) -> Projection:
        weight, scales, biases, packing = self._matrix(name, (out, width))
        offset = self.tensor(f"{name}.bias", (out,)) if bias else None
        if scales is None or packing is None:
            return Linear(weight, offset)
        return QuantizedLinear(weight, scales, biases, packing, offset)

    def embedding(
        self, name: str, rows: int, width: int
    ) -> Embedding | QuantizedEmbedding:
        weight, scales, biases, packing = self._matrix(name, (rows, width))
        if scales is None or packing is None:
            return Embedding(weight)
        return QuantizedEmbedding(weight, scales, biases, packing)

    def experts(
        self, name: str, count: int, out: int, width: int, bias: bool
    ) -> ExpertProjection:
        weight, scales, biases, packing = self._matrix(name, (count, out, width))
        offset = self.tensor(f"{name}.bias", (count, out)) if bias else None
        if scales is None or packing is None:
            return ExpertLinear(weight, offset)
        return QuantizedExpertLinear(weight, scales, biases, packing, offset)

    def finish(self) -> None:
        """Check that every tensor of the checkpoint was asked for.

        Raises:
            LoadError: If some are left, which means a part of the model is unknown.
        """
        if self._tensors:
            names = sorted(self._tensors)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise LoadError(
                f"{self._source} has tensors the decoder does not know: "
                f"{', '.join(names[:3])}{more}",
                "the checkpoint is of a newer or different architecture",
            )


def read_safetensors(folder: Path) -> Tensors:
    """Map every tensor of a checkpoint folder lazily.

    Raises:
        LoadError: If there is no weight file, or one is cut short or not safetensors.
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise LoadError(
            f"no model*.safetensors in {folder}",
            "point --model at the folder that holds config.json and the weights",
        )
    tensors: Tensors = {}
    for file in files:
        tensors.update(read_tensors(file)[0])
    return tensors


def canonical_tensors(tensors: Tensors, family: Family, num_layers: int) -> Tensors:
    """Rename published tensors to canonical names, stacking per-expert matrices.

    Multi-token-prediction layers (numbered ``num_layers`` and up) and buffers that
    no forward pass reads are left out.
    """
    renamed: Tensors = {}
    for name, value in tensors.items():
        if _is_unused(name, family, num_layers):
            continue
        for published, canonical in family.renames:
            name = name.replace(published, canonical)
        renamed[name] = value
    return _split_fused(_stack_experts(renamed, family))


_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(\w+)\.(\w+)$")


def _is_unused(name: str, family: Family, num_layers: int) -> bool:
    layer = _LAYER.match(name)
    return (
        name.endswith("rotary_emb.inv_freq")
        or (layer is not None and int(layer[1]) >= num_layers)
        or any(part in name for part in family.dropped)
    )


def _stack_experts(tensors: Tensors, family: Family) -> Tensors:
    """(prefix).experts.3.w1.weight and its siblings -> one (E, …) tensor."""
    names = family.expert_names or {}
    groups: dict[str, dict[int, mx.array]] = {}
    stacked: Tensors = {}
    for name, value in tensors.items():
        found = _EXPERT.match(name)
        if found is None:
            stacked[name] = value
            continue
        prefix, expert, matrix, part = found.groups()
        key = f"{prefix}.{names.get(matrix, matrix)}.{part}"
        groups.setdefault(key, {})[int(expert)] = value
    for key, members in groups.items():
        stacked[key] = mx.stack(_in_order(key, members))
    return stacked


def _in_order(key: str, members: dict[int, mx.array]) -> list[mx.array]:
    missing = sorted(set(range(max(members) + 1)) - members.keys())
    if missing:
        raise LoadError(f"{key!r} lacks the matrices of experts {missing}")
    return [members[expert] for expert in sorted(members)]


def _split_fused(tensors: Tensors) -> Tensors:
    """Split fused gate-and-up expert matrices into gate_proj and up_proj."""
    split: Tensors = {}
    for name, value in tensors.items():
        if ".mlp.experts.gate_up_proj." in name:  # granite: halves of axis 1
            gate, up = mx.split(value, 2, axis=1)
            _put_pair(split, name.replace("gate_up_proj", "{}"), gate, up)
        elif ".mlp.experts.gate_up_proj_bias" in name:  # gpt-oss: every other row
            key = name.replace("gate_up_proj_bias", "{}.bias")
            _put_pair(split, key, *_alternate(value, axis=1))
        elif ".mlp.experts.gate_up_proj_" in name:
            stem, part = name.rsplit("_", 1)
            key = _packed_name(stem.replace("gate_up_proj", "{}"), part)
            _put_pair(split, key, *_alternate(_packed(value, part), axis=1))
        elif name.endswith(".mlp.experts.down_proj_bias"):
            split[name.replace("_bias", ".bias")] = value
        elif ".mlp.experts.down_proj_" in name:
            stem, part = name.rsplit("_", 1)
            split[_packed_name(stem, part)] = _packed(value, part)
        else:
            split[name] = value
    return split


def _put_pair(tensors: Tensors, key: str, gate: mx.array, up: mx.array) -> None:
    tensors[key.format("gate_proj")] = gate
    tensors[key.format("up_proj")] = up


def _alternate(value: mx.array, axis: int) -> Iterable[mx.array]:
    even = mx.arange(0, value.shape[axis], 2)
    return mx.take(value, even, axis), mx.take(value, even + 1, axis)


def _packed_name(stem: str, part: str) -> str:
    return f"{stem}.{'weight' if part == 'blocks' else part}"


def _packed(value: mx.array, part: str) -> mx.array:
    """Published mxfp4 blocks (E, rows, groups, 16) uint8 -> (E, rows, words) uint32."""
    return value.view(mx.uint32).flatten(-2) if part == "blocks" else value
