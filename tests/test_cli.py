"""The command: flags, pipes, errors and exit codes."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_spec_app.cli import COMMANDS, main
from mlx_spec_app.request import LoadRequest, Request
from mlx_spec_app.settings import VARIABLES, flags_from
from tests.app.fakes import FakeBackend, broken
from tests.checkpoints import write_text_checkpoint


class Pipe(io.TextIOWrapper):
    """Standard input with given bytes; a terminal if there are none."""

    def __init__(self, data: bytes | None) -> None:
        super().__init__(io.BytesIO(data or b""), encoding="utf-8")
        self._is_terminal = data is None

    def isatty(self) -> bool:
        return self._is_terminal


def run(
    monkeypatch: pytest.MonkeyPatch,
    *words: str,
    backend: FakeBackend | None = None,
    stdin: bytes | None = None,
) -> int:
    monkeypatch.setattr(sys, "stdin", Pipe(stdin))
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    try:
        return main(words, backend or FakeBackend())
    except SystemExit as error:  # argparse
        return int(error.code or 0)


BASE = ("generate", "--model", "m", "-p", "hi")
FLAGS: list[tuple[list[str], str, Any]] = [
    (["--model", "x"], "load.model", "x"),
    (["--drafter", "none"], "load.drafter", "none"),
    (["--drafter", "lookup"], "load.drafter", "lookup"),
    (["--draft-model", "d"], "load.draft_model", "d"),
    (["--num-draft-tokens", "7"], "load.num_draft_tokens", 7),
    (["--dtype", "float32"], "load.dtype", "float32"),
    (["--kv-bits", "8"], "load.kv_bits", 8),
    (["--extra-eos-token", "a", "b"], "load.extra_eos_tokens", ("a", "b")),
    (["--max-tokens", "9"], "max_tokens", 9),
    (["-m", "9"], "max_tokens", 9),
    (["--temp", "0.7"], "sampling.temperature", 0.7),
    (["--temperature", "0.7"], "sampling.temperature", 0.7),
    (["--top-p", "0.9"], "sampling.top_p", 0.9),
    (["--top-k", "40"], "sampling.top_k", 40),
    (["--min-p", "0.05"], "sampling.min_p", 0.05),
    (["--repetition-penalty", "1.1"], "sampling.repetition_penalty", 1.1),
    (["--presence-penalty", "0.2"], "sampling.presence_penalty", 0.2),
    (["--frequency-penalty", "0.3"], "sampling.frequency_penalty", 0.3),
    (["--seed", "11"], "seed", 11),
    (["--rule", "coupled"], "rule", "coupled"),
    (["--system-prompt", "be"], "system_prompt", "be"),
    (["-s", "be"], "system_prompt", "be"),
    (["--prefill-step-size", "64"], "prefill_step_size", 64),
    (["--stop", "A", "--stop", "B"], "stop", ("A", "B")),
    (["--ignore-chat-template"], "raw", True),
]


def value_at(request: Request, path: str) -> Any:
    value: Any = request
    for name in path.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(("flags", "path", "expected"), FLAGS)
def test_every_flag_reaches_the_engine(
    flags: list[str], path: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FakeBackend()
    assert run(monkeypatch, *BASE, *flags, backend=backend) == 0
    request = backend.asked[0][1]
    assert value_at(request, path) == expected
    assert backend.loads == [request.load]


@pytest.mark.parametrize(("flags", "path", "expected"), FLAGS)
def test_every_flag_changes_something(
    flags: list[str], path: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FakeBackend()
    run(monkeypatch, *BASE, backend=backend)
    assert value_at(backend.asked[0][1], path) != expected


def test_defaults_are_mlx_lms(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    run(monkeypatch, *BASE, backend=backend)
    request = backend.asked[0][1]
    assert (request.max_tokens, request.seed, request.prefill_step_size) == (
        100,
        0,
        2048,
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p) == (0.0, 1.0)
    assert (sampling.top_k, sampling.min_p) == (0, 0.0)
    assert request.load == LoadRequest(model="m")


def test_the_library_backend_hands_everything_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dataclasses import fields

    from mlx_spec import SamplingParams, generation, loading
    from mlx_spec_app.backend import LibraryBackend

    calls: list[dict[str, Any]] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        calls.append({"args": args, **kwargs})
        return iter(())

    monkeypatch.setattr(loading, "load", recorded)
    monkeypatch.setattr(generation, "stream_generate", recorded)
    request = Request(
        load=LoadRequest(
            model="m",
            drafter="model",
            draft_model="d",
            num_draft_tokens=3,
            dtype="bfloat16",
            kv_bits=4,
        ),
        sampling=SamplingParams(
            temperature=0.1,
            top_p=0.2,
            top_k=3,
            min_p=0.4,
            repetition_penalty=1.5,
            presence_penalty=0.6,
            frequency_penalty=0.7,
        ),
        max_tokens=8,
        seed=9,
        rule="coupled",
        stop=("x",),
        raw=True,
        prefill_step_size=10,
    )
    LibraryBackend().load(request.load)
    list(LibraryBackend().answer("model", "p", request, "c"))  # type: ignore[arg-type]
    load, answer = calls
    assert load["args"] == ("m", "model")
    assert {k: v for k, v in load.items() if k != "args"} == {
        "draft_model": "d",
        "num_draft_tokens": 3,
        "dtype": "bfloat16",
        "kv_bits": 4,
    }
    assert answer["args"] == ("model", "p")
    expected = {
        "num_draft_tokens": 3,
        "max_tokens": 8,
        "temp": 0.1,
        "top_p": 0.2,
        "top_k": 3,
        "min_p": 0.4,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.7,
        "seed": 9,
        "rule": "coupled",
        "stop": ("x",),
        "raw": True,
        "prefill_step_size": 10,
        "conversation": "c",
    }
    assert {k: v for k, v in answer.items() if k != "args"} == expected
    assert {f.name for f in fields(Request)} >= {"seed", "rule", "stop", "raw"}


def test_the_answer_is_all_there_is_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = FakeBackend([["Hä", "llo", " ✓"]])
    assert run(monkeypatch, *BASE, "--stats", backend=backend) == 0
    out, err = capsys.readouterr()
    assert out == "Hällo ✓\n"
    assert "prompt: 12 tokens, 3 from the cache, 100.0 tok/s" in err
    assert "answer: 3 tokens, 42.5 tok/s, 3 forward calls" in err
    assert "acceptance length 1.50, accept rate 0%, per position 0%" in err


def test_without_stats_stderr_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, *BASE, "--no-stream")
    assert capsys.readouterr() == ("ok\n", "")


def test_json_is_one_object_with_all_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, *BASE, "--json", backend=FakeBackend([["a", "b"]]))
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == "ab"
    assert result["tokens"] == [0, 1]
    assert result["finish_reason"] == "stop"
    assert result["acceptance_length"] == 2.0
    assert result["accept_rate"] == 0.0
    assert result["accept_rate_per_position"] == [0.0]
    assert result["generation_tps"] == 42.5
    assert result["peak_memory"] == 1.25


@pytest.mark.parametrize(
    ("words", "stdin", "expected"),
    [
        (["-p", "hi"], None, "hi"),
        (["-p", "-"], b"from a pipe\n", "from a pipe"),
        ([], b"from a pipe\n", "from a pipe"),
        (["-p", "Summarise."], b"A text.\n", "A text.\n\nSummarise."),
        (["-p", "hi"], b"", "hi"),
        (["-p", "hi"], b"  \n", "hi"),
    ],
)
def test_prompts_come_from_the_flag_and_from_pipes(
    words: list[str],
    stdin: bytes | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = FakeBackend()
    command = ("generate", "--model", "m", *words)
    assert run(monkeypatch, *command, backend=backend, stdin=stdin) == 0
    assert backend.asked[0][0] == expected


def test_a_system_prompt_makes_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    run(monkeypatch, *BASE, "-s", "Be brief.", backend=backend)
    assert backend.asked[0][0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


@pytest.mark.parametrize(
    "words", [("--model", "m", "-p", "hi"), ("--model", "m", "--prompt=hi")]
)
def test_a_prompt_without_a_command_generates(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FakeBackend()
    assert run(monkeypatch, *words, backend=backend) == 0
    assert backend.asked[0][0] == "hi"


def test_the_model_may_be_positional(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    run(monkeypatch, "generate", "some/model", "-p", "hi", backend=backend)
    assert backend.loads[0].model == "some/model"


USAGE: list[tuple[list[str], bytes | None, str]] = [
    (["generate", "-p", "hi"], None, "no model is given"),
    ([*BASE, "--temp", "-1"], None, "temperature is -1"),
    ([*BASE, "--temp", "nan"], None, "temperature is nan"),
    ([*BASE, "--temp", "warm"], None, "invalid float value"),
    ([*BASE, "--top-p", "1.5"], None, "top_p is 1.5"),
    ([*BASE, "--min-p", "-0.1"], None, "min_p is -0.1"),
    ([*BASE, "--top-k", "-3"], None, "top_k is -3"),
    ([*BASE, "--max-tokens", "0"], None, "--max-tokens is 0"),
    ([*BASE, "--num-draft-tokens", "0"], None, "num_draft_tokens is 0"),
    ([*BASE, "--prefill-step-size", "0"], None, "--prefill-step-size is 0"),
    ([*BASE, "--kv-bits", "3"], None, "invalid choice"),
    ([*BASE, "--drafter", "ngram"], None, "invalid choice"),
    ([*BASE, "--drafter", "model"], None, "--draft-model"),
    ([*BASE, "--drafter", "none", "--draft-model", "d"], None, "no use for"),
    (["generate", "--model", "m", "-p", ""], None, "the prompt is empty"),
    (["generate", "--model", "m"], b"", "the prompt is empty"),
    (["generate", "--model", "m"], b"caf\xe9", "stdin is not UTF-8: byte 3 is 0xe9"),
    (["nonsense"], None, "no command 'nonsense'"),
    ([*BASE, "--no-such-flag"], None, "unrecognized arguments"),
    (["chat", "--model", "m"], b"", "needs a terminal"),
    (["bench"], None, "no model is given"),
    (["bench", "m", "-n", "0"], None, "--num-trials is 0"),
]


@pytest.mark.parametrize(("words", "stdin", "message"), USAGE)
def test_wrong_usage_is_one_line_and_exit_code_2(
    words: list[str],
    stdin: bytes | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    backend = FakeBackend()
    assert run(monkeypatch, *words, backend=backend, stdin=stdin) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert backend.loads == [], "usage is checked before anything is loaded"


def test_a_runtime_error_is_one_line_with_its_hint_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = FakeBackend(load_error=broken("no such folder"))
    assert run(monkeypatch, *BASE, backend=backend) == 1
    expected = "error: no such folder\nhint: do something else\n"
    assert capsys.readouterr() == ("", expected)


def test_debug_shows_where_an_error_came_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = FakeBackend(load_error=broken())
    assert run(monkeypatch, *BASE, "--debug", backend=backend) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_keeps_the_text_so_far_and_exits_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(FakeBackend):
        def answer(self, *args: Any) -> Any:
            for response in super().answer(*args):
                yield response
                raise KeyboardInterrupt

    backend = Interrupted([["some", "text"]])
    assert run(monkeypatch, *BASE, backend=backend) == 130
    assert capsys.readouterr().out == "some"


def test_the_environment_gives_defaults_that_typed_flags_beat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = flags_from({"MLX_SPEC_TEMP": "0.5", "MLX_SPEC_MODEL": "env", "OTHER": "1"})
    assert sorted(flags) == ["--model=env", "--temp=0.5"]
    backend = FakeBackend()
    monkeypatch.setattr(sys, "stdin", Pipe(None))
    monkeypatch.setenv("MLX_SPEC_TEMP", "0.5")
    monkeypatch.setenv("MLX_SPEC_MODEL", "env")
    main(["generate", "-p", "hi"], backend)
    main(["generate", "typed", "-p", "hi", "--temp", "0.9"], backend)
    assert [load.model for load in backend.loads] == ["env", "typed"]
    temperatures = [request.sampling.temperature for _, request in backend.asked]
    assert temperatures == [0.5, 0.9]


HEAVY = ("mlx", "mlx_lm", "transformers", "textual", "numpy")


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)],
)
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    script = (
        "import sys\nfrom mlx_spec_app.cli import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
        "names = {n.split('.')[0] for n in sys.modules}\n"
        f"print('LOADED', sorted(names & set({HEAVY!r})))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "LOADED []" in run.stdout


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("cli") / "model")


def command(*words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "mlx_spec_app", *words],
        input=stdin,
        capture_output=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "LANG": "C", "PYTHONPATH": ":".join(sys.path)},
    )


def test_the_real_command_gives_the_same_text_with_and_without_a_drafter(
    checkpoint: Path,
) -> None:
    base = ("generate", str(checkpoint), "-m", "24", "-p", "abcabc", "--json")
    plain, drafted = (
        command(*base, "--drafter", drafter) for drafter in ("none", "lookup")
    )
    assert (plain.returncode, plain.stderr) == (0, b"")
    assert drafted.returncode == 0
    first, second = json.loads(plain.stdout), json.loads(drafted.stdout)
    assert first["tokens"] == second["tokens"]
    assert first["text"] == second["text"]


def test_the_real_command_refuses_bad_checkpoints(
    checkpoint: Path, tmp_path: Path
) -> None:
    cases = {
        str(tmp_path / "missing"): b"there is no folder",
        str(tmp_path): b"not a checkpoint",
    }
    for folder, message in cases.items():
        run = command("generate", folder, "-p", "hi")
        assert run.returncode == 1
        assert message in run.stderr
        assert b"Traceback" not in run.stderr
        assert run.stdout == b""


def test_the_real_command_refuses_a_prompt_longer_than_the_context(
    checkpoint: Path,
) -> None:
    run = command("generate", str(checkpoint), stdin=b"word " * 600)
    assert run.returncode == 1
    assert b"the model's context is 512" in run.stderr
    assert b"Traceback" not in run.stderr
