from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.arguments.options import engine_config
from octavo.engine.cli import command_parser, main
from octavo.engine.cli.serve_options import ServeOptions, serve_options


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "octavo.toml"


def _parsed(*argv: str) -> argparse.Namespace:
    return command_parser(["serve"]).parse_args(argv)


def _config(*argv: str) -> EngineConfig:
    return engine_config(_parsed(*argv))


def _options(*argv: str) -> ServeOptions:
    return serve_options(_parsed(*argv))


def test_the_command_line_comes_first_then_variables_then_the_file(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml.write_text('model = "file"\nkv-format = "fp4"\nmax_running = 3\nthreads = 5\nnum-pages = 7\n')
    monkeypatch.setenv("OCTAVO_CONFIG", str(toml))
    monkeypatch.setenv("OCTAVO_MAX_RUNNING", "4")
    monkeypatch.setenv("OCTAVO_MODEL", "variable")
    found = _config("--threads", "6", "--kv-memory", "1GiB")
    assert (found.kv_format, found.max_running, found.threads, found.model) == ("fp4", 4, 6, "variable")
    assert (found.kv_memory, found.num_pages) == (2**30, None), "the file's pages give way to the memory"
    assert _config("asked").model == "asked"
    assert _config("--model", "asked").model == "asked"


def test_vllms_spellings_are_ours(toml: Path) -> None:
    toml.write_text('max-num-seqs = 9\n"kv-cache-dtype" = "bfloat16"\n')
    flags = [
        "--config",
        str(toml),
        "--block-size",
        "16",
        "--max-num-batched-tokens",
        "77",
        "--num-gpu-blocks-override",
        "8",
    ]
    found = _config(*flags, "--no-enable-prefix-caching")
    assert (found.max_running, found.kv_format, found.page_size) == (9, "bf16", 16)
    assert (found.max_step_tokens, found.num_pages, found.prefix_cache) == (77, 8, False)
    http = _options("--port", "1234").http
    assert http is not None
    assert str(http) == "127.0.0.1:1234"
    other = _options("--host", "0.0.0.0").http
    assert other is not None
    assert str(other) == "0.0.0.0:8000"


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [("NO_PREFIX_CACHE", "1", False), ("NO_PREFIX_CACHE", "no", True), ("PREFIX_CACHE", "0", False),
     ("PREFIX_CACHE", "TRUE", True)],
)  # fmt: skip
def test_switches_are_true_or_false(
    name: str, value: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"OCTAVO_{name}", value)
    assert _config().prefix_cache is kept


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [("ASYNC_STEPS", "1", True), ("ASYNC_STEPS", "0", False), ("NO_ASYNC_STEPS", "1", False),
     ("NO_ASYNC_STEPS", "0", True)],
)  # fmt: skip
def test_a_switch_with_a_default_of_its_own_has_two_options(
    name: str, value: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _config().async_steps is None
    assert _config("--async-steps").async_steps is True
    assert _config("--no-async-steps").async_steps is False
    assert _config("--no-async-scheduling").async_steps is False
    monkeypatch.setenv(f"OCTAVO_{name}", value)
    assert _config().async_steps is kept
    assert _config("--async-steps").async_steps is True


@pytest.mark.parametrize("option", ["prefix-cache", "enable-prefix-caching"])
def test_a_switch_is_turned_on_and_off_and_the_last_word_counts(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _config(f"--{option}").prefix_cache is True
    assert _config(f"--no-{option}").prefix_cache is False
    assert _config(f"--no-{option}", f"--{option}").prefix_cache is True
    monkeypatch.setenv("OCTAVO_EXACT", "1")
    assert _config().exact is True
    assert _config("--no-exact").exact is False


def test_several_names(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml.write_text('served-model-name = ["a", "b"]\n')
    assert _config("--config", str(toml)).served_model_name == ("a", "b")
    assert _options("--config", str(toml)).http is None, "no MODEL is among the names"
    monkeypatch.setenv("OCTAVO_SERVED_MODEL_NAME", "c, d")
    assert _config("--config", str(toml)).served_model_name == ("c", "d")
    twice = _config("demo", "--served-model-name", "e", "f", "--served-model-name", "g")
    assert twice.served_model_name == ("e", "f", "g")


def test_a_service_of_kubernetes_is_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_PORT", "tcp://10.0.0.1:50051")
    assert _options().http is None
    monkeypatch.setenv("OCTAVO_PORT", "50")
    http = _options().http
    assert http is not None
    assert http.port == 50


def test_every_option_has_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for action in command_parser(["serve"])._actions:
        for option in action.option_strings:
            if (action.type is None and action.choices is None) or not option.startswith("--"):
                continue
            name = "OCTAVO_" + option.removeprefix("--").replace("-", "_").upper()
            if action.type is Path:
                continue
            monkeypatch.setenv(name, "\n:")
            with pytest.raises(SystemExit):
                _parsed()
            monkeypatch.delenv(name)


WRONG: dict[str, tuple[str, str]] = {
    "no such option": ('kv_formt = "fp4"', "kv-format"),
    "nested too deep": ("a = " + 50_000 * "[", "not nest"),
    "not TOML": ("kv_format = fp4", "not TOML"),
    "twice": ('kv_format = "fp4"\nkv-format = "fp5"', "second time"),
    "a table": ("[serve]\nthreads = 1", "'serve'"),
    "a list": ("threads = [1, 2]", "one value"),
    "no number": ('threads = "x"', "threads in"),
    "no truth": ('exact = "maybe"', "maybe"),
    "a truth": ("threads = true", "must be a value"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_one_line(name: str, toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, hint = WRONG[name]
    toml.write_text(text)
    _fails(capsys, hint, "--config", str(toml))


def test_a_wrong_variable_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "many")
    _fails(capsys, "(from OCTAVO_MAX_NUM_SEQS)")
    monkeypatch.delenv("OCTAVO_MAX_NUM_SEQS")
    monkeypatch.setenv("OCTAVO_CONFIG", "/nowhere/octavo.toml")
    _fails(capsys, "/nowhere/octavo.toml")


@pytest.mark.parametrize(
    "argv", [("a", "--model", "b"), ("--model", "b", "a"), ("--served-model-name", "n", "m")]
)
def test_two_models_are_reported(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    _fails(capsys, "MODEL", *argv)


def test_help_names_aliases_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for word in (
        "--max-num-seqs",
        "--kv-cache-dtype",
        "--block-size",
        "OCTAVO_KV_FORMAT",
        "--served-model-name",
    ):
        assert word in text


def _fails(capsys: pytest.CaptureFixture[str], hint: str, *argv: Any) -> None:
    assert main(["serve", *argv]) == 2
    _, err = capsys.readouterr()
    assert err.count("\n") == 1, err
    assert hint in err


def test_a_file_that_is_not_there(toml: Path) -> None:
    from octavo.engine.arguments.sources import found_options

    with pytest.raises(InvalidConfig, match="cannot be read"):
        found_options(command_parser(["serve"]), ["--config", str(toml)], {})


@pytest.mark.parametrize("command", ["serve", "cache"])
def test_unknown_variables_are_named_with_the_nearest_option(
    command: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("OCTAVO_KV_FROMAT", "OCTAVO_XYZZY", "OCTAVO_KV_FORMAT", "OCTAVO_CPU_ISA"):
        monkeypatch.setenv(name, "int8")
    for name in ("OCTAVO_SERVICE_HOST", "OCTAVO_PORT_50051_TCP_ADDR", "OCTAVO_GRPC_SERVICE_PORT_HTTP"):
        monkeypatch.setenv(name, "10.0.0.1")
    monkeypatch.setenv("OCTAVO_HTTP_PORT", "9999")
    monkeypatch.setenv("OCTAVO_GRPC_PORT", "tcp://10.0.0.1:50051")
    if command == "serve":
        assert _config().kv_format == "int8"
    else:
        assert main(["cache", "stats", "--connect", "127.0.0.1:1"]) != 0
    assert [record.getMessage() for record in caplog.records] == [
        "OCTAVO_HTTP_PORT is not an option of octavo serve and is ignored; did you mean OCTAVO_PORT?",
        "OCTAVO_KV_FROMAT is not an option of octavo serve and is ignored; did you mean OCTAVO_KV_FORMAT?",
        "OCTAVO_XYZZY is not an option of octavo serve and is ignored; "
        "see `octavo serve --help` for the options",
    ]
