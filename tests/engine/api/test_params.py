from __future__ import annotations

import argparse
import math
import struct

import pytest

from octavo.engine import InvalidRequest, SamplingParams
from octavo.engine.arguments.options import add_sampling_arguments, sampling_arguments


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": -5}, "max_tokens must be at least 1, got -5"),
        ({"temperature": -0.1}, "temperature must be between 0 and 100, got -0.1"),
        ({"temperature": math.nan}, "temperature must be .* got nan"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p must be above 0"),
        ({"min_p": 1.5}, "min_p must be between 0 and 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be between 0.01 and 100, got 0.0"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty must be between 0.01 and 100, got 1e-39"),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be between 0.01 and 100"),
        ({"repetition_penalty": math.nan}, "repetition_penalty must be between 0.01 and 100, got nan"),
        ({"presence_penalty": 3}, "presence_penalty must be between -2 and 2"),
        ({"frequency_penalty": -3}, "frequency_penalty must be between -2 and 2"),
        ({"logit_bias": {5: 101.0}}, "logit_bias of token 5 must be between -100 and 100"),
        ({"seed": -1}, "seed must be between 0 and"),
        ({"n": 0}, "n must be between 1 and 64, got 0"),
        ({"n": 65}, "n must be between 1 and 64"),
        ({"stop": ("",)}, "stop must not contain the empty string"),
        ({"stop": ("x",) * 17}, "number of stop strings must be between 0 and 16, got 17"),
        ({"stop": ("x" * 1025,)}, "a stop string must be at most 1024 characters, got 1025"),
        ({"logprobs": -1}, "logprobs must be between 0 and 20"),
        ({"logprobs": 21}, "logprobs must be between 0 and 20"),
    ],
)
def test_a_value_outside_its_range_is_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        SamplingParams(**values)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_the_ends_of_the_ranges_are_allowed() -> None:
    SamplingParams(max_tokens=1, temperature=0, top_k=0, top_p=1, min_p=0, n=64, seed=2**64 - 1, logprobs=20)
    SamplingParams(repetition_penalty=0.01)
    # Protobuf messages have float32.
    SamplingParams(repetition_penalty=struct.unpack("f", struct.pack("f", 0.01))[0])
    SamplingParams(temperature=100, top_p=1e-9, min_p=1, n=1, seed=0, logprobs=0, stop=("x" * 1024,) * 16)


def test_options_are_made_from_declared_parameters() -> None:
    parser = argparse.ArgumentParser()
    add_sampling_arguments(parser, max_tokens=7)
    assert sampling_arguments(parser.parse_args([])) == {}
    line = "--min-tokens 2 --top-p 0.5 --logit-bias 3=-1.5 --logit-bias 4=2 --stop a --stop b --stop-id 9"
    assert sampling_arguments(parser.parse_args([*line.split(), "--ignore-eos"])) == {
        "min_tokens": 2, "top_p": 0.5, "logit_bias": {3: -1.5, 4: 2.0}, "stop": ("a", "b"), "stop_ids": (9,),
        "ignore_eos": True,
    }  # fmt: skip
    assert "number of output tokens (default: 7)" in parser.format_help()


@pytest.mark.parametrize("text", ["3", "x=1", "3=", "=2"])
def test_a_bias_is_a_token_and_a_number(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_sampling_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--logit-bias", text])
    assert f"must be a token id and a number, such as 42=-1.5, got '{text}'" in capsys.readouterr().err


def test_one_stop_string_is_not_a_list_of_letters() -> None:
    with pytest.raises(InvalidRequest, match=r"stop must be a tuple of strings, got 'end'"):
        SamplingParams(stop="end")  # type: ignore[arg-type]
