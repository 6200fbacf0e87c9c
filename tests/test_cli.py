"""The command: flags, pipes, errors and exit codes."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from mlx_spec import __version__
from mlx_spec_app import demo
from mlx_spec_app.cli import COMMANDS, Parser, main
from mlx_spec_app.request import LoadRequest, Request
from mlx_spec_app.settings import VARIABLES, quiet_libraries
from mlx_spec_models import embedded
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
    env: Mapping[str, str] = MappingProxyType({}),
) -> int:
    monkeypatch.setattr(sys, "stdin", Pipe(stdin))
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in env.items():
        monkeypatch.setenv(variable, value)
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
    (
        ["--extra-eos-token", "a", "--extra-eos-token", "b"],
        "load.extra_eos_tokens",
        ("a", "b"),
    ),
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
        (["-p", "hi"], b"  code\n    more\n\n", "  code\n    more\n\nhi"),
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
    "words",
    [
        ("--model", "m", "-p", "hi"),
        ("--model", "m", "--prompt=hi"),
        ("-phi", "--model", "m"),
    ],
)
def test_a_prompt_without_a_command_generates(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FakeBackend()
    assert run(monkeypatch, *words, backend=backend) == 0
    assert backend.asked[0][0] == "hi"


@pytest.mark.parametrize(
    "words",
    [
        ("some/model", "-p", "hi"),
        ("-p", "hi", "--extra-eos-token", "a", "some/model"),
    ],
)
def test_the_model_may_be_positional(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FakeBackend()
    run(monkeypatch, "generate", *words, backend=backend)
    assert backend.loads[0].model == "some/model"


def embed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let a folder be the embedded model, on a machine with 24 GB to use."""
    (folder / "config.json").touch()
    monkeypatch.setattr(embedded, "EMBEDDED_MODEL", folder)
    monkeypatch.setattr(demo, "usable_memory", lambda: 24 * 10**9)


@pytest.mark.parametrize("words", [["generate", "-p", "hi"], ["-p", "hi"], []])
def test_without_a_model_the_embedded_one_answers(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    embed(monkeypatch, tmp_path)
    backend = FakeBackend()
    stdin = None if words else b"hi"
    assert run(monkeypatch, *words, backend=backend, stdin=stdin) == 0
    (load,) = backend.loads
    assert load == LoadRequest(model=str(tmp_path), is_embedded=True)
    assert load.name == "tiny-moe (embedded)"
    assert capsys.readouterr() == ("ok\n", ""), "stderr is no terminal"


@pytest.mark.parametrize("words", [["--model", "m"], ["m"]])
def test_a_named_model_is_not_the_embedded_one(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FakeBackend()
    run(monkeypatch, "generate", *words, "-p", "hi", backend=backend)
    env = {"MLX_SPEC_MODEL": "m"}
    run(monkeypatch, "generate", "-p", "hi", backend=backend, env=env)
    assert backend.loads == [LoadRequest(model="m")] * 2
    assert backend.loads[0].name == "m"


class Screen(io.StringIO):
    """A terminal that is written to."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_is_told_what_the_embedded_model_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    embed(monkeypatch, tmp_path)
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    assert run(monkeypatch, "-p", "hi") == 0
    assert screen.getvalue() == (
        "note: A 4-million-parameter demo model that knows capitals, elements, units, "
        "small sums and text editing. A real one: "
        "mlx-spec generate mlx-community/Qwen3-30B-A3B-4bit\n"
    )
    assert capsys.readouterr().out == "ok\n"
    assert run(monkeypatch, *BASE) == 0
    assert screen.getvalue().count("note:") == 1, "not of a model the user named"


def test_where_no_known_model_fits_none_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "usable_memory", lambda: 10**9)
    assert demo.introduction("chat").endswith("A real one: mlx-spec chat MODEL")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_embedded_model_is_an_error_that_says_what_to_do(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(embedded, "EMBEDDED_MODEL", tmp_path / "gone")
    backend = FakeBackend()
    assert run(monkeypatch, name, backend=backend) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "error: the embedded model is missing: there is no "
        f"{tmp_path}/gone/config.json\n"
        "hint: install mlx-spec again, or name a folder or repository: --model\n"
    )
    assert backend.loads == []


USAGE: list[tuple[list[str], bytes | None, str]] = [
    (["generate", "--model", "", "-p", "hi"], None, "name of the model is empty"),
    ([*BASE, "--temp", "-1"], None, "temperature is -1"),
    ([*BASE, "--temp", "nan"], None, "temperature is nan"),
    ([*BASE, "--temp", "warm"], None, "invalid float value"),
    ([*BASE, "--top-p", "1.5"], None, "top_p is 1.5"),
    ([*BASE, "--min-p", "-0.1"], None, "min_p is -0.1"),
    ([*BASE, "--top-k", "-3"], None, "top_k is -3"),
    ([*BASE, "--max-tokens", "0"], None, "--max-tokens/-m: 0 is too small"),
    ([*BASE, "--max-tokens", "few"], None, "invalid int value: 'few'"),
    ([*BASE, "--num-draft-tokens", "0"], None, "--num-draft-tokens: 0 is too small"),
    ([*BASE, "--prefill-step-size", "0"], None, "--prefill-step-size: 0 is too small"),
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
    ([*BASE, "--prompt", "caf\udce9"], None, "not UTF-8"),
    ([*BASE, "-s", "caf\udce9"], None, "not UTF-8"),
    ([*BASE, "other"], None, "two models are given: other and m"),
    ([*BASE, "-s", "be", "--ignore-chat-template"], None, "needs the chat template"),
    (["bench", "m", "-n", "0"], None, "--num-trials/-n: 0 is too small, use 1 or more"),
    (["bench", "m", "--top-p", "2"], None, "top_p is 2.0, use above 0 and at most 1"),
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
    assert "error: " in err
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


@pytest.mark.parametrize("flags", [[], ["--no-stream"], ["--json"]])
def test_an_interrupt_keeps_the_text_so_far_and_exits_130(
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Interrupted(FakeBackend):
        def answer(self, *args: Any) -> Any:
            for response in super().answer(*args):
                yield response
                raise KeyboardInterrupt

    backend = Interrupted([["some", "text"]])
    assert run(monkeypatch, *BASE, *flags, backend=backend) == 130
    out = capsys.readouterr().out
    if "--json" not in flags:
        assert out == "some\n"
        return
    result = json.loads(out)
    assert (result["text"], result["finish_reason"]) == ("some", "interrupted")


ENVIRONMENT: list[tuple[dict[str, str], list[str], str, Any]] = [
    ({"TEMP": "0.5"}, [], "sampling.temperature", 0.5),
    ({"TEMP": "0.5"}, ["--temp", "0.9"], "sampling.temperature", 0.9),
    ({"TEMP": ""}, [], "sampling.temperature", 0.0),
    ({"RULE": "coupled"}, [], "rule", "coupled"),
    ({"MODEL": "env"}, [], "load.model", "m"),
    ({"DRAFTER": "none"}, [], "load.drafter", "none"),
    ({"DRAFTER": "none"}, ["--draft-model", "d"], "load.draft_model", "d"),
    ({"DRAFTER": "none"}, ["--draft-model", "d"], "load.drafter", "auto"),
    ({"DRAFT_MODEL": "d"}, [], "load.draft_model", "d"),
    ({"DRAFT_MODEL": "d"}, ["--drafter", "none"], "load.draft_model", None),
    ({"DRAFT_MODEL": "d"}, ["--drafter", "model"], "load.draft_model", "d"),
    ({"SYSTEM_PROMPT": "s"}, ["--ignore-chat-template"], "system_prompt", None),
]


@pytest.mark.parametrize(("variables", "flags", "path", "expected"), ENVIRONMENT)
def test_a_typed_flag_beats_the_environment_and_that_the_default(
    variables: dict[str, str],
    flags: list[str],
    path: str,
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = FakeBackend()
    environment = {f"MLX_SPEC_{name}": value for name, value in variables.items()}
    assert run(monkeypatch, *BASE, *flags, backend=backend, env=environment) == 0
    assert value_at(backend.asked[0][1], path) == expected


def test_the_environment_may_name_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    for words in (["-p", "hi"], ["typed", "-p", "hi"]):
        env = {"MLX_SPEC_MODEL": "env"}
        run(monkeypatch, "generate", *words, backend=backend, env=env)
    assert [load.model for load in backend.loads] == ["env", "typed"]


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TEMP", "warm", "argument --temp/--temperature: invalid float value: 'warm'"),
        ("TEMP", "-1", "argument --temp/--temperature: temperature is -1.0, use 0, or"),
        ("TOP_P", "1.5", "argument --top-p: top_p is 1.5, use above 0"),
        ("TOP_K", "-3", "argument --top-k: top_k is -3, use 0 or more"),
        ("MIN_P", "2", "argument --min-p: min_p is 2.0, use from 0 to 1"),
        ("REPETITION_PENALTY", "0", "argument --repetition-penalty: repetition_pen"),
        ("PRESENCE_PENALTY", "1e9", "argument --presence-penalty: presence_penalty is"),
        ("FREQUENCY_PENALTY", "nan", "argument --frequency-penalty: frequency_penal"),
        ("MAX_TOKENS", "0", "argument --max-tokens/-m: 0 is too small, use 1 or more"),
        ("NUM_DRAFT_TOKENS", "0", "argument --num-draft-tokens: 0 is too small"),
        ("PREFILL_STEP_SIZE", "0", "argument --prefill-step-size: 0 is too small"),
        ("KV_BITS", "3", "argument --kv-bits: invalid choice"),
    ],
)
def test_a_bad_variable_is_named(
    variable: str,
    value: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    backend = FakeBackend()
    env = {f"MLX_SPEC_{variable}": value}
    assert run(monkeypatch, *BASE, backend=backend, env=env) == 2
    expected = f"error: MLX_SPEC_{variable}: {message}"
    assert capsys.readouterr().err.startswith(expected)
    assert backend.loads == []


def test_every_variable_stands_for_a_flag_of_generate_and_chat() -> None:
    from mlx_spec_app import chat_command, generate_command

    for command in (chat_command, generate_command):
        parser = Parser()
        command.add_arguments(parser)
        for flag in VARIABLES.values():
            assert f"{flag} " in parser.format_help() or flag == "--model"


@pytest.mark.parametrize("with_progress", [True, False])
def test_the_libraries_are_quiet_unless_asked(
    with_progress: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_VERBOSITY"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    quiet_libraries(with_progress)
    disabled = os.environ["HF_HUB_DISABLE_PROGRESS_BARS"]
    assert disabled == ("0" if with_progress else "1")
    assert os.environ["HF_HUB_VERBOSITY"] == "error"
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "info"


@pytest.mark.parametrize(
    "words",
    [[], ["--temp", "1"], *([name] for name in COMMANDS)],
)
def test_the_version_is_shown(
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *words, "--version") == 0
    assert capsys.readouterr() == (f"mlx-spec {__version__}\n", "")


@pytest.mark.parametrize("words", [["--help"], *([n, "--help"] for n in COMMANDS)])
def test_help_lists_the_version_and_what_is_used_without_a_model(
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *words) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--version" in text
    assert "small demo model that is installed with mlx-spec" in text


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


def environment(**variables: str) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)} | variables


def command(
    *words: str, stdin: bytes | None = b"", **variables: str
) -> subprocess.CompletedProcess[bytes]:
    """Run the command in a process of its own; standard input None is closed."""
    call = [sys.executable, "-m", "mlx_spec_app", *words]
    if stdin is None:
        call = ["/bin/sh", "-c", 'exec "$@" <&-', "sh", *call]
    return subprocess.run(
        call,
        input=stdin,
        capture_output=True,
        check=False,
        env=environment(**variables),
    )


def test_the_real_command_gives_the_same_text_with_and_without_a_drafter(
    checkpoint: Path,
) -> None:
    base = ("generate", str(checkpoint), "-m", "24", "-p", "abcabc", "--json")
    plain, drafted = (
        command(*base, "--drafter", drafter, LANG="C") for drafter in ("none", "lookup")
    )
    assert (plain.returncode, plain.stderr) == (0, b"")
    assert drafted.returncode == 0
    first, second = json.loads(plain.stdout), json.loads(drafted.stdout)
    assert first["tokens"] == second["tokens"]
    assert first["text"] == second["text"]


def test_an_embedded_checkpoint_answers_without_a_network(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(embedded, "EMBEDDED_MODEL", checkpoint)
    monkeypatch.setattr(sys, "stdin", Pipe(None))
    assert main(["-p", "hi", "-m", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert 1 <= result["generation_tokens"] <= 4


def test_output_is_utf8_where_the_locale_is_not(checkpoint: Path) -> None:
    run = command(
        "generate",
        str(checkpoint),
        *("-p", "hi", "-m", "8", "--drafter", "none", "--stats"),
        stdin=None,
        LC_ALL="C",
        PYTHONUTF8="0",
        PYTHONCOERCECLOCALE="0",
    )
    assert run.returncode == 0
    run.stdout.decode("utf-8")
    assert "per position –" in run.stderr.decode("utf-8")


Damage = Callable[[Path], list[str]]


def _cut_short(folder: Path) -> list[str]:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return []


def _rename_family(folder: Path) -> list[str]:
    file = folder / "config.json"
    file.write_text(file.read_text().replace("qwen3_moe", "no_such_family"))
    return []


def _unpair(folder: Path) -> list[str]:
    draft = write_text_checkpoint(folder / "draft")
    file = draft / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = list(vocabulary)[:2]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    file.write_text(json.dumps(tokenizer))
    return ["--draft-model", str(draft)]


def _remove(folder: Path) -> list[str]:
    (folder / "config.json").unlink()
    return []


def _leave(folder: Path) -> list[str]:
    return ["-p", "word " * 600]


def _ask_for_a_strange_token(folder: Path) -> list[str]:
    return ["--extra-eos-token", "<|no_such_token|>"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_remove, "not a checkpoint"),
        (_cut_short, "is cut short"),
        (_rename_family, "model_type 'no_such_family' is not supported"),
        (_unpair, "do not share a vocabulary"),
        (_leave, "the model's context is 512"),
        (_ask_for_a_strange_token, "no token '<|no_such_token|>'"),
    ],
)
def test_what_cannot_work_is_an_error_of_one_line(
    damage: Damage,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_text_checkpoint(tmp_path / "model")
    words = ["generate", str(folder), "-p", "hi", *damage(folder)]
    monkeypatch.setattr(sys, "stdin", Pipe(None))
    assert main(words) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


def test_the_real_command_says_so_if_there_is_no_such_folder(tmp_path: Path) -> None:
    run = command("generate", str(tmp_path / "missing"), "-p", "hi")
    assert run.returncode == 1
    assert b"there is no folder" in run.stderr
    assert run.stdout == b""


def test_a_chat_template_that_refuses_is_no_traceback(tmp_path: Path) -> None:
    folder = write_text_checkpoint(tmp_path / "model")
    file = folder / "tokenizer_config.json"
    refusal = "{{ raise_exception('System role not supported') }}"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"chat_template": refusal})
    )
    run = command("generate", str(folder), "-p", "hi", "-s", "be")
    assert run.returncode == 1
    assert b"System role not supported" in run.stderr
    assert b"Traceback" not in run.stderr


def start(checkpoint: Path) -> subprocess.Popen[bytes]:
    call = [sys.executable, "-m", "mlx_spec_app", "generate", str(checkpoint)]
    return subprocess.Popen(
        [*call, "-p", "hi", "-m", "480", "--ignore-chat-template"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )


def test_control_c_in_the_real_command_is_quiet(checkpoint: Path) -> None:
    with start(checkpoint) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert b"Traceback" not in err
    # Ended already, or interrupted; where that hits a nested exec, Python ends itself.
    assert process.returncode in (0, 130, -signal.SIGINT)


def test_a_reader_that_leaves_is_no_error(checkpoint: Path) -> None:
    with start(checkpoint) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
