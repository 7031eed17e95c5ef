"""Reference pages, generated from the help texts, docstrings and comments in the code."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2

import octavo.engine
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.setting import default_of, settings_of
from octavo.engine.cli import COMMANDS, command_parser
from octavo.engine.gguf.architectures import ARCHITECTURES
from octavo.engine.observability.prometheus import Metrics
from octavo_lab.commands.bench import BENCHES

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "docs" / "supported-models.md"
PROTOS = ("octavo/v1/generation.proto", "octavo/v1/cache.proto")


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |"]
    lines.append("|" + " --- |" * (lines[0].count(" | ") + 1))
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def cli() -> str:
    page = ["# Command line", "", "Generated from `octavo COMMAND --help`.", ""]
    commands = [(name,) for name in COMMANDS] + [("bench", name) for name in BENCHES]
    for command in commands:
        parser = command_parser(command)
        page += [f"## octavo {' '.join(command)}", "", parser.description or "", ""]
        for group in _groups(parser):
            if group.title not in (None, "options", "positional arguments"):
                page += [f"### {' '.join(command)}: {group.title}", ""]
            page += [table(("option", "meaning"), _options(group, parser)), ""]
    return "\n".join(page)


def _groups(parser: argparse.ArgumentParser) -> Iterator[argparse._ArgumentGroup]:
    for group in parser._action_groups:
        if any(_is_listed(action) for action in group._group_actions):
            yield group


def _is_listed(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)


def _options(group: argparse._ArgumentGroup, parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    formatter = parser._get_formatter()
    for action in group._group_actions:
        if _is_listed(action):
            text = formatter._expand_help(action) if action.help else ""
            yield f"`{_spelled(action)}`", text


def _spelled(action: argparse.Action) -> str:
    if action.choices is not None and action.metavar is None and not isinstance(action.choices, dict):
        value = "{" + ",".join(str(choice) for choice in action.choices) + "}"
    else:
        value = str(action.metavar or action.dest)
    if not action.option_strings:
        return value
    names = ", ".join(action.option_strings)
    return names if action.nargs == 0 else f"{names} {value}"


def config() -> str:
    return "\n".join(
        [
            "# Configuration",
            "",
            "Generated from `octavo.engine.EngineConfig` and `octavo.engine.SamplingParams`.",
            "",
            "## EngineConfig",
            "",
            table(("setting", "default", "meaning"), _fields(EngineConfig)),
            "## SamplingParams",
            "",
            table(("parameter", "default", "meaning"), _fields(SamplingParams)),
        ]
    )


def _fields(cls: type) -> Iterator[tuple[str, str, str]]:
    meanings = meanings_of(cls)
    for field in dataclasses.fields(cls):
        default = default_of(field)
        shown = "required" if default is dataclasses.MISSING else f"`{default!r}`"
        yield f"`{field.name}`", shown, meanings.get(field.name, "")


def meanings_of(cls: type) -> dict[str, str]:
    """Return the meaning of each field of a configuration class, from its declaration."""
    meanings = {}
    for name, (declared, default) in settings_of(cls).items():
        text = declared.explained(default)
        meanings[name] = f"{text[:1].upper()}{text[1:]}. {declared.more}".strip()
    return meanings


def metrics() -> str:
    rows = sorted((f"`{name}`", kind, labels, text) for name, kind, labels, text in _metrics(Metrics()))
    return "\n".join(
        [
            "# Metrics",
            "",
            "Generated from the registry behind `/metrics`. Units are seconds, bytes, tokens and pages. With "
            "`--vllm-metrics` the gauges that inference gateways read are exported under vLLM's names too.",
            "",
            table(("metric", "type", "labels", "meaning"), rows),
        ]
    )


def _metrics(metrics: Metrics) -> Iterator[tuple[str, str, str, str]]:
    for family in metrics.registry.collect():
        labels = sorted({key for sample in family.samples for key in sample.labels} - {"le"})
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        yield (
            family.name + suffix,
            family.type,
            ", ".join(f"`{name}`" for name in labels),
            family.documentation,
        )


def python() -> str:
    errors, rest = [], []
    for name in octavo.engine.__all__:
        cls = getattr(octavo.engine, name)
        if issubclass(cls, Exception):
            errors.append((f"`{name}`", f"`{cls.__bases__[0].__name__}`", " ".join(_doc(cls).split())))
        else:
            rest += [f"## {name}", "", _doc(cls), ""]
            rest += [part for method in _methods(cls) for part in method]
    return "\n".join(
        [
            "# Python",
            "",
            "Generated from the docstrings of `octavo.engine`. [Configuration](configuration.md) lists the "
            "fields of `EngineConfig` and `SamplingParams`; `examples/` has programs that run.",
            "",
            *rest,
            "## Errors",
            "",
            table(("error", "base", "meaning"), errors),
        ]
    )


def _methods(cls: type) -> Iterator[tuple[str, ...]]:
    for name, member in cls.__dict__.items():
        if inspect.isfunction(member) and not name.startswith("_") and member.__doc__:
            arguments = ", ".join(
                f"{mark}{parameter.name}"
                for parameter in inspect.signature(member).parameters.values()
                if parameter.name != "self"
                for mark in ("*" if parameter.kind is inspect.Parameter.VAR_POSITIONAL else "",)
            )
            wait = "await " if inspect.iscoroutinefunction(member) else ""
            wait = "async for ... in " if inspect.isasyncgenfunction(member) else wait
            yield f"### `{wait}{cls.__name__}.{name}({arguments})`", "", _doc(member), ""


def _doc(thing: type | object) -> str:
    blocks = (inspect.getdoc(thing) or "").replace("``", "`").split("\n\n")
    aligned = re.compile(r"^\S+( \S+)*  +\S", flags=re.MULTILINE)
    return "\n\n".join(f"```text\n{block}\n```" if aligned.search(block) else block for block in blocks)


def models() -> str:
    from mlx_lm.utils import MODEL_REMAPPING

    published = json.loads((ROOT / "tests" / "data" / "published_configs.json").read_text("utf-8"))
    text = (ROOT / "docs" / "architectures.md").read_text("utf-8")
    served = dict(re.findall(r"^\| `([^`]+)` \| \w+ \| ([^|]*) \|", text, flags=re.MULTILINE))
    from_gguf = {architecture.model_type for architecture in ARCHITECTURES.values()} | {"gemma3"}
    families: dict[str, list[str]] = {}
    for checkpoint, settings in published.items():
        families.setdefault(settings["model_type"], []).append(f"`{checkpoint}`")
    rows = [
        (
            f"`{kind}`",
            ", ".join(sorted(names)),
            served[MODEL_REMAPPING.get(kind, kind)].strip(),
            "yes" if MODEL_REMAPPING.get(kind, kind) in from_gguf else "",
        )
        for kind, names in sorted(families.items())
    ]
    return "\n".join(
        [
            _MODELS_BEFORE,
            table(("model type", "for example", "layers", "GGUF too"), rows),
            _MODELS_AFTER,
        ]
    )


_MODELS_BEFORE = """# Supported models

Octavo serves a checkpoint if it knows the `model_type` in its `config.json`.
[Architectures](architectures.md) lists every model type. The table gives checkpoints of common ones.
Another checkpoint of the same model type works the same way, also with weights quantized by mlx-lm
(`mlx-community/...`).
"""
_MODELS_AFTER = """## What was compared

- The published `config.json` of each checkpoint above is built in full size, without weights. Each of
  its keys is applied by the model or known to change nothing; otherwise loading is refused.
- Every model type is loaded with a small model of random weights, and its results are compared with
  those of mlx-lm's untouched model.
- `SmolLM2-135M-Instruct` runs with its real weights: its perplexity on English prose and its answers
  are compared with mlx-lm's. The tests have not downloaded the other checkpoints of the table.
- Octavo repeats the comparison with mlx-lm at every start, and refuses a model whose results differ.

To check a model of your own, run `octavo doctor --model FOLDER`.
"""


def rpc() -> str:
    page = [
        "# gRPC",
        "",
        "Generated from `proto/octavo/v1`. The same port serves `vllm.grpc.engine.VllmEngine` (package "
        "`smg-grpc-proto`), `grpc.health.v1.Health` and server reflection.",
        "",
    ]
    for file in _described():
        comments = {tuple(place.path): _comment(place) for place in file.source_code_info.location}
        for i, service in enumerate(file.service):
            page += [f"## {file.package}.{service.name}", "", comments.get((6, i), ""), ""]
            rows = [
                (
                    f"`{method.name}`",
                    _stream(method.client_streaming, method.input_type),
                    _stream(method.server_streaming, method.output_type),
                    comments.get((6, i, 2, j), ""),
                )
                for j, method in enumerate(service.method)
            ]
            page += [table(("method", "request", "response", "meaning"), rows), ""]
        for i, message in enumerate(file.message_type):
            page += [f"### {message.name}", "", comments.get((4, i), ""), ""]
            fields = [
                (f"`{field.name}`", str(field.number), _type(field), comments.get((4, i, 2, j), ""))
                for j, field in enumerate(message.field)
            ]
            if fields:
                page += [table(("field", "number", "type", "meaning"), fields), ""]
    return "\n".join(page)


def _described() -> list[descriptor_pb2.FileDescriptorProto]:
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "described"
        arguments = ["protoc", f"-I{ROOT / 'proto'}", f"--descriptor_set_out={out}", "--include_source_info"]
        if protoc.main([*arguments, *PROTOS]) != 0:
            raise RuntimeError("protoc could not read the .proto files; run `make proto`")
        described = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    return list(described.file)


def _comment(place: descriptor_pb2.SourceCodeInfo.Location) -> str:
    return " ".join((place.leading_comments or place.trailing_comments).split())


def _stream(streams: bool, name: str) -> str:
    short = f"`{name.rpartition('.')[2]}`"
    return f"stream of {short}" if streams else short


def _type(field: descriptor_pb2.FieldDescriptorProto) -> str:
    kinds = descriptor_pb2.FieldDescriptorProto
    if field.type_name:
        kind = field.type_name.rpartition(".")[2]
    else:
        kind = kinds.Type.Name(field.type).removeprefix("TYPE_").lower()
    label = (
        "repeated " if field.label == kinds.LABEL_REPEATED else "optional " if field.proto3_optional else ""
    )
    return f"`{label}{kind}`"
