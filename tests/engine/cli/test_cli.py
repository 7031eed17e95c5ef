from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.api.config import EngineConfig
from octavo.engine.arguments.options import add_engine_arguments, engine_config, engine_flags, given_settings
from octavo.engine.arguments.usage import Parser
from octavo.engine.cli import COMMANDS, generate, main

GENERATE = ["generate", "Once upon a time", "--num-pages", "16", "--max-tokens", "6"]


def _run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS), ["bench", "serve"]], ids=" ".join)
def test_help_exits_0(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    code, out, err = _run(capsys, *command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith("usage: octavo")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import octavo

    assert _run(capsys, "--version") == (0, f"octavo {octavo.__version__}\n", "")


WRONG: dict[str, tuple[list[str], str]] = {
    "no command": ([], "COMMAND"),
    "unknown command": (["nope"], "nope"),
    "unknown flag": (["serve", "--bogus"], "--bogus"),
    "abbreviated flag": (["generate", "x", "--max-tok", "3"], "--max-tok"),
    "flag of nothing yet": (["serve", "--tls-cert", "x"], "--tls-cert"),
    "a number with letters": (["serve", "--queue-timeout", "x"], "must be a number, got 'x'"),
    "a fraction of a sequence": (["serve", "--max-running", "1.5"], "must be a whole number, got '1.5'"),
    "a seed with letters": (["bench", "quality", "--seed", "x"], "must be a whole number, got 'x'"),
    "an event before the first": (
        ["cache", "watch", "--connect", "127.0.0.1:1", "--start", "-1"],
        "must be a whole number of at least 0, got '-1'",
    ),
    "bytes of no folder": (
        ["serve", "--cache-dir-bytes", "1GiB"],
        "cache_dir_bytes must be left out without cache_dir, got 1073741824; set cache_dir, too",
    ),
    "id that no message holds": (
        ["generate", "x", "--connect", "127.0.0.1:1", "--stop-id", "-1"],
        "-1; token ids",
    ),
    "target of a simulation": (["bench", "schedule", "--target-itl", "-1"], "above 0, got '-1'"),
    "rates of a simulation": (["bench", "schedule", "--rates", "1,x"], "above 0, got 'x'"),
    "pages of a simulation": (["bench", "schedule", "--swap-pages", "-1"], "at least 1, got '-1'"),
    "costs of a simulation": (["bench", "schedule", "--row-ms", "nan"], "of at least 0, got 'nan'"),
    "no key": (["serve", "--api-key", ""], "--api-key"),
    "key with a space": (["serve", "--api-key", "a b"], "without spaces"),
    "address": (["serve", "--listen", "here"], "HOST:PORT"),
    "metrics address": (["serve", "--metrics", "127.0.0.1:x"], "port"),
    "drain timeout": (["serve", "--drain-timeout", "-1"], "-1"),
    "log level": (["serve", "--log-level", "loud"], "loud"),
    "format": (["generate", "x", "--kv-format", "fp3"], "fp3"),
    "pair of formats": (["generate", "x", "--kv-format", "fp4/"], "fp4/"),
    "three formats": (["generate", "x", "--kv-format", "fp4/fp4/fp4"], "two, written K/V"),
    "backend": (["generate", "x", "--backend", "tpu"], "tpu"),
    "size": (["generate", "x", "--kv-memory", "lots"], "lots"),
    "two sizes": (["generate", "x", "--kv-memory", "1GiB", "--num-pages", "4"], "not allowed"),
    "no prompt": (["generate"], "PROMPT"),
    "two constraints": (["generate", "x", "--regex", "a", "--choice", "b"], "regex and choice"),
    "no schema there": (["generate", "x", "--json-schema", "/nowhere.json"], "/nowhere.json"),
    "two prompts": (["generate", "x", "--prompt-ids", "1"], "--prompt-ids"),
    "ids that are none": (["generate", "--prompt-ids", "1,x"], "1,x"),
    "no ids": (["generate", "--prompt-ids", ""], "empty"),
    "chat of ids": (["generate", "--prompt-ids", "1", "--chat"], "--chat"),
    "too long": (["generate", "x", "--num-pages", "2", "--max-tokens", "100"], "64"),
    "temperature": (["generate", "x", "--temperature", "-1"], "temperature"),
    "not a number": (["generate", "x", "--seed", "x"], "--seed"),
    "value of two lines": (["serve", "--bogus\nline"], "--bogus line"),
    "no such model": (["generate", "x", "--model", "./no/such/folder"], "no/such/folder"),
    "server option": (["generate", "x", "--connect", "localhost:1", "--kv-format", "fp4"], "--kv-format"),
    "connect address": (["generate", "x", "--connect", "localhost"], "HOST:PORT"),
    "bench": (["bench", "nope"], "nope"),
    "bench rate": (["bench", "serve", "--rate", "0"], "--rate"),
    "bench prefix": (["bench", "serve", "--shared-prefix-tokens", "999"], "999"),
    "bench option": (["bench", "serve", "--connect", "localhost:1", "--threads", "1"], "--threads"),
    "plan without memory": (["plan"], "--memory"),
    "plan memory": (["plan", "--memory", "much"], "much"),
    "plan context": (["plan", "--memory", "1GiB", "--context", "0"], "--context"),
    "plan context too long": (["plan", "--memory", "1GiB", "--context", "999999"], "999999"),
    "plan page size": (["plan", "--memory", "1GiB", "--page-size", "33"], "33"),
    "plan model": (["plan", "--memory", "1GiB", "--model", "./no/such/folder"], "no/such/folder"),
    "doctor backend": (["doctor", "--backend", "metal"], "metal"),
    "doctor model": (["doctor", "--model", "/nowhere/at-all"], "nowhere"),
    "doctor weights": (["doctor", "--weights", "int8"], "--model"),
    "doctor threads": (["doctor", "--threads", "0"], "threads"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_usage_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], name: str) -> None:
    argv, hint = WRONG[name]
    code, out, err = _run(capsys, *argv)
    assert (code, out) == (2, ""), err
    assert err.startswith("octavo")
    assert err.count("\n") == 1, err
    assert hint in err
    assert "Traceback" not in err


def test_an_image_of_no_known_kind(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    code, _, err = _run(capsys, "replay", "t.jsonl", "--plot", "x.xyz")
    assert (code, err.count("\n")) == (2, 1)
    assert "a picture must be a .png or .svg file, got .xyz; change the name" in err


def test_a_plot_without_matplotlib(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = _run(capsys, "bench", "serve", "--connect", "127.0.0.1:1", "--plot", "x.png")
    assert code == 2
    assert "pip install matplotlib" in err


def test_a_broken_model_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"')
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    code, _, err = _run(capsys, "generate", "x", "--model", str(tmp_path))
    assert code == 2
    assert err.count("\n") == 1
    assert "config.json" in err


@pytest.mark.parametrize("option", ["--tls-ca", "--auth-token-file"])
def test_a_file_for_the_connection_that_is_not_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str
) -> None:
    missing = str(tmp_path / "none.pem")
    code, _, err = _run(capsys, "generate", "x", "--connect", "127.0.0.1:1", option, missing)
    assert (code, err.count("\n")) == (2, 1)
    assert f"{option} {missing} cannot be read" in err


def test_an_authority_that_is_no_pem_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "ca.der").write_bytes(b"\x30\x82\xff")
    code, _, err = _run(
        capsys, "generate", "x", "--connect", "127.0.0.1:1", "--tls-ca", str(tmp_path / "ca.der")
    )
    assert (code, err.count("\n")) == (2, 1)
    assert "ca.der must be a PEM file" in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_an_output_on_a_full_disk_prints_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["plan", "--model", "demo", "--memory", "1GiB"]) == 1
    err = capsys.readouterr().err
    assert err == "octavo plan: error: cannot write the output: No space left on device; make room\n"


def _generate_json(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[str, dict[str, Any]]:
    code, out, err = _run(capsys, *GENERATE, *more, "--json")
    assert code == 0, err
    human, last = out.rstrip("\n").rsplit("\n", 1)
    return human, json.loads(last)


def test_generate_in_process(capsys: pytest.CaptureFixture[str]) -> None:
    human, result = _generate_json(capsys)
    assert result.keys() == {"outputs", "prompt_tokens", "cached_tokens", "ttft_s", "tokens_per_s"}
    [output] = result["outputs"]
    assert output.keys() == {"index", "text", "token_ids", "finish_reason"}
    assert len(output["token_ids"]) == 6
    assert output["finish_reason"] == "length"
    assert human == output["text"]
    assert result["prompt_tokens"] > 3
    assert result["ttft_s"] > 0
    assert result["tokens_per_s"] > 0


def test_generate_several_samples_with_logprobs(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--n", "2", "--temperature", "1.5", "--seed", "3", "--logprobs", "2")
    human, result = _generate_json(capsys, *options)
    assert [output["index"] for output in result["outputs"]] == [0, 1]
    for output in result["outputs"]:
        assert f"[{output['index']}] {output['text']}" in human
        assert [entry["token_id"] for entry in output["logprobs"]] == output["token_ids"]
        assert all(len(entry["top"]) == 2 and entry["logprob"] <= 0 for entry in output["logprobs"])
    assert _generate_json(capsys, *options)[1]["outputs"] == result["outputs"], "the seed decides"


def test_generate_reads_stdin_and_speaks_chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.engine.memory.model_files import resolve_model
    from octavo.engine.tokenizer.tokenizer import load_tokenizer

    monkeypatch.setattr(sys, "stdin", io.StringIO("Who are you?"))
    code, out, err = _run(
        capsys, "generate", "-", "--system", "Be brief.", "--num-pages", "16", "--max-tokens", "2", "--json"
    )
    assert code == 0, err
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
    expected = load_tokenizer(resolve_model("demo")).apply_chat_template(messages)
    assert json.loads(out.splitlines()[-1])["prompt_tokens"] == len(expected)


def test_generate_puts_images_before_the_prompt() -> None:
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    prompt = generate.prompt_of(parser.parse_args(["what?", "--image", "a.png", "--image", "b.png"]))
    parts = [{"type": "image", "image": Path(name)} for name in ("a.png", "b.png")]
    assert prompt == [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "this model reads only text"),
        (["--vision"], "vision must be left out for"),
        (["--connect", "127.0.0.1:9"], "a.png cannot be read"),
    ],
)
def test_generate_refuses_images_that_nothing_reads(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    pages = [] if "--connect" in options else ["--num-pages", "16"]
    code, _, err = _run(capsys, "generate", "what?", "--image", "a.png", *pages, *options)
    assert (code, message in err.splitlines()[-1]) == (2, True), err


def test_generate_reports_accepted_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    text = "code 1 is red. code 2 is blue. code 1 is red. code 2 is"
    code, out, err = _run(
        capsys, "generate", text, "--ignore-eos", "--max-tokens", "64", "--speculate", "ngram", "--json"
    )
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])["speculation"]
    assert found.keys() == {"drafted", "accepted", "mean_accepted_length"}
    assert found["drafted"] >= found["accepted"] > 0
    assert found["mean_accepted_length"] > 1


@pytest.mark.parametrize(
    ("errors", "message"), [("strict", "invalid start byte"), ("surrogateescape", "lone")]
)
def test_generate_refuses_invalid_utf_8(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, errors: str, message: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a \xff"), "utf-8", errors))
    code, _, err = _run(capsys, "generate", "-", "--num-pages", "16")
    assert (code, len(err.splitlines())) == (2, 1)
    assert message in err


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(capsys, "doctor", "--json")
    assert code == 0, err
    report = json.loads(out.splitlines()[-1])
    assert report.keys() >= {"backend", "reason", "isa", "threads", "versions", "self_test", "ok"}
    assert report["ok"] is True
    assert len(report["self_test"]) > 10
    assert report["versions"]["mlx"] != "not installed"


def test_doctor_reports_the_kernels_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(capsys, "doctor", "--model", "demo", "--json")
    assert code == 0, err
    model = json.loads(out.splitlines()[-1])["model"]
    assert model["probe_error"] <= model["probe_limit"]
    if json.loads(out.splitlines()[-1])["backend"] == "cpu":
        assert model["fused"]
        assert model["replayed"]
        assert model["replaced"]["RMSNorm"] > 0
        assert sum(model["merged"].values()) > 0
        assert "  steps replayed: yes" in out
        assert model["head_chooses"]
        assert "  greedy tokens without stored logits: yes" in out


def test_doctor_fails_when_a_kernel_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.kernels.verify import selftest

    bad = selftest.SelfTestResult("attend", float("inf"), False)
    monkeypatch.setattr(selftest, "run_selftest", lambda _: [bad])
    code, out, _ = _run(capsys, "doctor", "--json")
    assert code == 1
    assert "FAIL attend" in out
    assert json.loads(out.splitlines()[-1])["self_test"] == [
        {"name": "attend", "max_error": None, "ok": False}
    ]


@pytest.mark.parametrize("exact", [False, True])
def test_doctor_tests_exact_arithmetic_on_request(
    exact: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.kernels.interface import AttentionBackend, LayerSpec, PoolSpec
    from octavo.kernels.verify import selftest

    layer = LayerSpec(num_kv_heads=1, head_dim=64, value_dim=64)
    spec = PoolSpec(layers=(layer,), num_pages=2, page_size=16, k_format="fp4", v_format="fp4")
    tested: list[bool] = []

    def note(backend: AttentionBackend) -> list[selftest.SelfTestResult]:
        tested.append(getattr(backend.create_pool(spec), "exact", exact))
        return []

    monkeypatch.setattr(selftest, "run_selftest", note)
    code, out, _ = _run(capsys, "doctor", "--json", *(["--exact"] if exact else []))
    assert code == 0
    assert tested == [exact]
    assert json.loads(out.splitlines()[-1])["exact"] == exact
    assert ("no 8-bit arithmetic" in out) == exact


def test_plan_says_when_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, "plan", "--memory", "1MiB", "--json")
    assert code == 1
    assert json.loads(out.splitlines()[-1])["fits"] is False


def _parse(*argv: str) -> Any:
    parser = Parser()
    add_engine_arguments(parser)
    return parser.parse_args(argv)


def test_engine_flags_give_their_settings_back() -> None:
    assert engine_config(_parse()) == EngineConfig()
    argv = ["--model", "m", "--exact", "--kv-format", "int8/fp4",
            "--kv-memory", "3MiB", "--threads", "2", "--no-prefix-cache", "--max-running", "9",
            "--weights", "int4"]  # fmt: skip
    settings = given_settings(_parse(*argv))
    assert settings == {
        "model": "m", "exact": True, "kv_format": "int8/fp4",
        "kv_memory": 3 * 2**20, "threads": 2, "prefix_cache": False, "max_running": 9, "weights": "int4",
    }  # fmt: skip
    assert given_settings(_parse(*engine_flags(settings))) == settings


def test_every_setting_has_its_flag() -> None:
    import dataclasses

    settings = {field.name for field in dataclasses.fields(EngineConfig)}
    assert settings == vars(_parse()).keys()


def test_usage_errors_answer_without_loading_mlx() -> None:
    program = (
        "import sys; from octavo.engine.cli import main; code = main(['serve', '--help']);"
        "heavy = {'mlx', 'grpc', 'tokenizers'} & {name.split('.')[0] for name in sys.modules};"
        "assert code == 0 and not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)


def test_outputs_obey_structured_output_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}')
    flags = ["--max-tokens", "40", "--prompt-logprobs", "1", "--json"]
    code, out, err = _run(capsys, *GENERATE, *flags, "--json-schema", str(schema))
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert set(json.loads(found["outputs"][0]["text"])) <= {1, 2}
    assert [entry["logprob"] is None for entry in found["prompt_logprobs"]][:2] == [True, False]
    assert len(found["prompt_logprobs"]) == found["prompt_tokens"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8:strict"])
def test_no_encoding_of_a_terminal_ends_a_command(encoding: str) -> None:
    code = (
        "import sys; from octavo.engine import cli\n"
        "class Command:\n"
        "    add_arguments = staticmethod(lambda parser: None)\n"
        "    run = staticmethod(lambda args: print('é漢', ascii(sys.stdin.read())) or 0)\n"
        "cli.importlib.import_module = lambda name: Command\n"
        "sys.exit(cli.main(['doctor']))"
    )
    environ = os.environ | {"PYTHONIOENCODING": encoding}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, input="ü".encode(), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    shown = {
        "ascii": rb"\xe9\u6f22 '\xfc'",
        "latin-1": b"\xe9\\u6f22 '\\xc3\\xbc'",
        "utf-8:strict": "é漢".encode() + rb" '\xfc'",
    }
    assert done.stdout.strip() == shown[encoding]
