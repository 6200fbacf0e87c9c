"""Loading: everything that cannot work fails here, in one clear line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_spec import (
    DraftModelDrafter,
    LoadError,
    PromptLookupDrafter,
    SpecError,
    load,
)
from mlx_spec.drafters.model import check_vocabularies
from mlx_spec.loading import load_decoder, make_drafter, resolve_folder
from tests.checkpoints import write_checkpoint, write_text_checkpoint, write_tokenizer

VOCAB = 300


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("loading") / "model")


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint, tmp_path / "copy")


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_folder_loads_with_lookup_as_its_drafter(checkpoint: Path) -> None:
    model = load(checkpoint)
    assert isinstance(model.drafter, PromptLookupDrafter)
    assert model.target.vocab_size == VOCAB


def test_a_draft_model_is_the_drafter_when_it_is_named(checkpoint: Path) -> None:
    model = load(checkpoint, draft_model=checkpoint)
    assert isinstance(model.drafter, DraftModelDrafter)
    assert load(checkpoint, "none").drafter is None


def test_a_drafter_object_is_taken_as_it_is(checkpoint: Path) -> None:
    drafter = PromptLookupDrafter(2)
    assert load(checkpoint, drafter).drafter is drafter
    assert load(checkpoint, None).drafter is None


def test_on_a_cpu_half_precision_checkpoints_compute_in_float32(copy: Path) -> None:
    tensors = mx.load(str(copy / "model.safetensors"))
    halves = {name: value.astype(mx.float16) for name, value in tensors.items()}
    mx.save_safetensors(str(copy / "model.safetensors"), halves)
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    assert load_decoder(copy).dtype == (mx.float32 if on_cpu else mx.float16)
    assert load_decoder(copy, dtype="bfloat16").dtype == mx.bfloat16


def damage_truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def damage_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x05\x00\x00\x00\x00\x00\x00\x00hello")


def damage_empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def damage_missing_tensor(folder: Path) -> None:
    tensors = mx.load(str(folder / "model.safetensors"))
    tensors.pop("model.layers.1.self_attn.q_proj.weight")
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)


def damage_missing_expert(folder: Path) -> None:
    tensors = mx.load(str(folder / "model.safetensors"))
    name = next(n for n in tensors if ".experts.2." in n)
    tensors.pop(name)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)


def damage_unknown_tensor(folder: Path) -> None:
    tensors = mx.load(str(folder / "model.safetensors"))
    tensors["model.layers.0.self_attn.extra.weight"] = mx.zeros((2,))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        "no model\\*.safetensors",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer"),
    "broken config": (
        lambda f: (f / "config.json").write_text("{"),
        "not valid JSON",
    ),
    "config is a list": (
        lambda f: (f / "config.json").write_text("[]"),
        "not a JSON object",
    ),
    "binary config": (
        lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"),
        "not valid JSON",
    ),
    "broken tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{"),
        "tokenizer",
    ),
    "unknown model_type": (
        lambda f: edit_config(f, model_type="gpt9"),
        "'gpt9' is not supported",
    ),
    "other shape": (lambda f: edit_config(f, hidden_size=32), "has shape"),
    "smaller vocabulary": (lambda f: edit_config(f, vocab_size=90), "has shape"),
    "truncated weights": (damage_truncated, "cut short"),
    "broken header": (damage_header, "not a complete safetensors"),
    "empty weights": (damage_empty, "not a complete safetensors"),
    "missing tensor": (damage_missing_tensor, "no tensor .*layers.1.self_attn.q_proj"),
    "missing expert": (damage_missing_expert, "experts"),
    "unknown tensor": (damage_unknown_tensor, "self_attn.extra"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoints_are_refused_in_one_line(name: str, copy: Path) -> None:
    damage, message = DAMAGES[name]
    damage(copy)
    with pytest.raises(LoadError, match=message) as caught:
        load(copy)
    assert "\n" not in caught.value.message


def test_a_tokenizer_of_another_model_is_refused(copy: Path) -> None:
    write_tokenizer(copy, VOCAB + 20)
    with pytest.raises(LoadError, match=r"tokenizer .* has token ids up to"):
        load(copy)


@pytest.mark.parametrize(
    "name", ["./missing", "/missing/folder", "missing", "a/b/c", "~/missing"]
)
def test_a_missing_folder_is_refused_without_asking_the_network(name: str) -> None:
    with pytest.raises(LoadError, match="no folder"):
        resolve_folder(name)


def test_a_repository_that_cannot_be_had_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub

    def unreachable(*args: object, **kwargs: object) -> str:
        raise OSError("no network\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(LoadError, match="cannot be downloaded: no network"):
        resolve_folder("someone/some-model")


def test_a_repository_is_downloaded_without_code_or_pickle(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    import huggingface_hub

    asked: list[list[str]] = []

    def download(repository: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(checkpoint)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_folder("someone/some-model") == checkpoint
    assert not [p for p in asked[0] if p.endswith((".py", ".bin", ".pt", ".pkl"))]


def test_a_file_instead_of_a_folder_is_refused(checkpoint: Path) -> None:
    with pytest.raises(LoadError, match="is a file"):
        resolve_folder(checkpoint / "config.json")


@pytest.mark.parametrize(
    ("kind", "draft", "count", "message"),
    [
        ("model", None, None, "needs a model"),
        ("none", "x", None, "no use for the draft model"),
        ("lookup", "x", None, "no use for the draft model"),
        ("ngram", None, None, "unknown"),
        ("lookup", None, 0, "num_draft_tokens is 0"),
    ],
)
def test_contradictory_drafter_settings_are_refused(
    checkpoint: Path, kind: str, draft: str | None, count: int | None, message: str
) -> None:
    model = load(checkpoint, "none")
    with pytest.raises(SpecError, match=message):
        make_drafter(
            model,
            kind,  # type: ignore[arg-type]
            draft_model=draft,
            num_draft_tokens=count,
        )


class Words:
    def __init__(self, *words: str) -> None:
        self._vocab = {word: index for index, word in enumerate(words)}

    def get_vocab(self) -> dict[str, int]:
        return self._vocab


def test_vocabularies_must_agree_on_every_id() -> None:
    assert check_vocabularies(Words("a", "b", "c"), Words("a", "b", "c")) == 3
    for other in (Words("a", "c", "b"), Words("a", "b"), Words("a", "b", "c", "d")):
        with pytest.raises(LoadError, match="do not share a vocabulary"):
            check_vocabularies(Words("a", "b", "c"), other)


def test_a_draft_model_of_another_vocabulary_is_refused(
    checkpoint: Path, copy: Path
) -> None:
    edit_config(copy, vocab_size=VOCAB + 20)
    shutil.rmtree(copy)
    write_checkpoint(copy, "llama", overrides={"vocab_size": VOCAB + 20})
    write_tokenizer(copy, VOCAB + 20)
    with pytest.raises(LoadError, match="do not share a vocabulary"):
        load(checkpoint, draft_model=copy)


def test_a_bad_dtype_or_kv_bits_is_refused(checkpoint: Path) -> None:
    with pytest.raises(SpecError, match="dtype 'int4'"):
        load_decoder(checkpoint, dtype="int4")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="kv_bits is 3"):
        load_decoder(checkpoint, kv_bits=3)
