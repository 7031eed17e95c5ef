"""Counts of patterns that make text hard to read; each count may only fall (see CONTRIBUTING.md).

When a count falls, lower its limit here in the same commit."""

from __future__ import annotations

import argparse
import ast
import functools
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.engine.cli import COMMANDS, command_parser

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("block_manager", "engine", "integrations", "kernels", "proto", "scheduler")
OPENERS = re.compile(
    r"(What|Who|Whoever|Whom|Which|Where|When|How|Why|Of|The same|The one|One|Those|It|As|In|With|Beside)\b"
)
PEOPLE = re.compile(r"\b(who|whoever|whom|nobody|somebody|everybody)\b", re.IGNORECASE)
POINTING_HELP = re.compile(r"(of|and|what|which|its|these|those|the same|likewise|\()(?=\W|$)")


def python_files(folders: tuple[str, ...] = PRODUCT) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                yield path


@functools.cache
def docstrings(path: Path) -> list[str]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = ast.walk(ast.parse(path.read_text()))
    return [text for node in nodes if isinstance(node, kinds) and (text := ast.get_docstring(node))]


@functools.cache
def comments(path: Path) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def prose(path: Path) -> str:
    return re.sub(r"```.*?```|`[^`]*`", "", path.read_text(), flags=re.DOTALL)


def documents() -> list[Path]:
    return [
        *(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "SECURITY")),
        ROOT / "docs" / "index.md",
        ROOT / "docs" / "quick-start.md",
        *sorted((ROOT / "docs" / "guides").glob("*.md")),
    ]


def help_texts() -> Iterator[str]:
    def of(parser: argparse.ArgumentParser) -> Iterator[str]:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for sub in action.choices.values():
                    yield from of(sub)
            elif action.help and action.help is not argparse.SUPPRESS:
                yield action.help

    for command in COMMANDS:
        yield from of(command_parser([command]))


def test_first_lines_of_docstrings_name_their_subject() -> None:
    found = [text for path in python_files() for text in docstrings(path) if OPENERS.match(text)]
    assert len(found) <= MOST_OPENERS, f"{len(found)} docstrings begin like {found[-1].splitlines()[0]!r}"


def test_people_words_are_kept_for_people() -> None:
    found = sum(
        len(PEOPLE.findall(text)) for path in python_files() for text in (*docstrings(path), *comments(path))
    )
    assert found <= MOST_PEOPLE_WORDS, f"{found} people words in docstrings and comments"


@pytest.mark.parametrize("part", ["product", "tests"])
def test_docstrings_and_comments_get_fewer(part: str) -> None:
    files = python_files(PRODUCT if part == "product" else ("tests",))
    found = sum(len([*docstrings(path), *comments(path)]) for path in files)
    assert found <= MOST_TEXTS[part], f"{found} docstrings and comments: delete one for each new one"


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_documents_have_no_people_words_for_data(path: Path) -> None:
    assert PEOPLE.findall(prose(path)) == PEOPLE_OF_DOCUMENTS.get(path.name, [])


def test_help_texts_stand_alone() -> None:
    found = sorted({text for text in help_texts() if POINTING_HELP.match(text)})
    assert len(found) <= MOST_POINTING_HELP, found


def test_new_commit_subjects_fit_in_72_characters() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there are no commits to read")
    done = subprocess.run(
        ["git", "log", "--no-merges", "--format=%s", f"{LAST_LONG_SUBJECT}..HEAD"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"history is cut off before {LAST_LONG_SUBJECT}")
    assert [subject for subject in done.stdout.splitlines() if len(subject) > 72] == []


LAST_LONG_SUBJECT = "4a5509eb"
MOST_OPENERS = 2
MOST_PEOPLE_WORDS = 0
MOST_POINTING_HELP = 0
MOST_TEXTS = {"product": 2_183, "tests": 1_211}
PEOPLE_OF_DOCUMENTS = {
    "CONTRIBUTING.md": ["who", "nobody"],
    "README.md": ["Nobody"],
    "SECURITY.md": ["who", "who"],
    "fairness.md": ["who"],
}
