"""The benchmark runs, counts right and says honestly whether texts are the same."""

import json
import sys
from pathlib import Path

import pytest

from mlx_spec import LoadedModel, PromptLookupDrafter, SamplingParams, bench, load
from mlx_spec.bench import BenchSettings
from mlx_spec_app.cli import main
from mlx_spec_models import embedded
from tests.checkpoints import write_text_checkpoint

SETTINGS = BenchSettings(generation_tokens=12, prompt_tokens=40, num_trials=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("bench") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load(folder, PromptLookupDrafter(2, 4, 1))


def test_speed_compares_the_drafter_with_plain_decoding(model: LoadedModel) -> None:
    rows = bench.bench_speed(model, SETTINGS, prompts={"short": "abcabc"})
    assert [row["prompt"] for row in rows] == ["short"]
    row = rows[0]
    assert row["identical"] is True
    assert row["generation_tokens"] == 12
    plain, drafted, speedup = (
        row[name] for name in ("plain_tps", "generation_tps", "speedup")
    )
    assert isinstance(plain, float)
    assert isinstance(drafted, float)
    assert speedup == pytest.approx(drafted / plain)


def test_speed_says_when_texts_differ(model: LoadedModel) -> None:
    first = bench._answer(model, "abc", None, SETTINGS, SamplingParams())
    other = bench._answer(model, "xyz", None, SETTINGS, SamplingParams())
    assert bench._compare([first], [first])["identical"] is True
    assert bench._compare([first], [other])["identical"] is False


def test_overhead_has_a_row_for_each_width(model: LoadedModel) -> None:
    sampling = SamplingParams(temperature=0.8, top_p=0.95)
    rows = bench.bench_overhead(model, SETTINGS, sampling, widths=(2, 3))
    assert [row["width"] for row in rows] == [2, 3]


def test_the_other_suites_run(model: LoadedModel) -> None:
    assert bench.bench_mlx_lm(model, SETTINGS)[0]["comparison"] == "plain decoding"
    assert bench.bench_cache(300)[0]["appended_tokens"] == 300
    assert bench.bench_lookup(1_000)[0]["history_tokens"] == 1_000
    prefill = bench.bench_prefill(model, SETTINGS)[0]
    assert prefill["prompt_tokens"] == 40
    assert prefill["peak_memory"]


def test_the_command_prints_a_table_and_json(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["bench", str(folder), "-g", "8", "-n", "1", "-p", "20"]
    words += ["--suite", "speed", "prefill"]
    monkeypatch.setattr(sys, "argv", ["mlx-spec"])
    assert main(words) == 0
    table = capsys.readouterr().out
    assert table.startswith(f"model: {folder}\n")
    assert "speedup" in table
    assert "peak_memory" in table
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"model", "machine", "speed", "prefill"}
    assert result["model"] == str(folder)
    assert {row["prompt"] for row in result["speed"]} == set(bench.PROMPTS)


def test_without_a_model_the_embedded_one_is_measured(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "EMBEDDED_MODEL", folder)
    assert main(["bench", "-p", "20", "-n", "1", "--suite", "prefill"]) == 0
    assert capsys.readouterr().out.startswith("model: tiny-moe (embedded)\n")
