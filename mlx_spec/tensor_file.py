"""Safetensors files: checked before they are mapped, replaced in one step."""

import json
import os
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from mlx_spec.errors import LoadError

Tensors = dict[str, mx.array]


def read_tensors(file: Path) -> tuple[Tensors, dict[str, str]]:
    """Map a file's tensors lazily; return them with the file's metadata.

    Raises:
        LoadError: If the file is cut short or not safetensors.
    """
    _check_complete(file)
    loaded = mx.load(str(file), return_metadata=True)
    tensors, metadata = loaded
    return tensors, metadata  # type: ignore[return-value]


def write_tensors(file: Path, tensors: Tensors, metadata: Mapping[str, str]) -> None:
    """Write a file whole or not at all: a reader never sees half of it."""
    handle, temporary = tempfile.mkstemp(dir=file.parent, suffix=".safetensors")
    os.close(handle)
    try:
        mx.save_safetensors(temporary, tensors, dict(metadata))
        os.replace(temporary, file)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _check_complete(file: Path) -> None:
    """Compare a file's size with its own header."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (header_size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(min(header_size, size)))
            entries = {k: v for k, v in header.items() if k != "__metadata__"}
            ends = [entry["data_offsets"][1] for entry in entries.values()]
    except (struct.error, ValueError, AttributeError, KeyError, TypeError) as error:
        raise LoadError(
            f"{file} is not a complete safetensors file", "download it again"
        ) from error
    needed = 8 + header_size + max(ends, default=0)
    if size < needed:
        raise LoadError(
            f"{file} is cut short: {size:,} of {needed:,} bytes", "download it again"
        )
