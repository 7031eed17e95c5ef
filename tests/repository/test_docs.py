from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import octavo.engine
from docs_site import benchmarks, pages, reference
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.cli import COMMANDS, command_parser
from octavo.proto import cache_pb2, generation_pb2

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PACKAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING")),
    *(
        path
        for name in ("block_manager", "engine", "kernels", "deploy")
        for path in (ROOT / name).rglob("README.md")
    ),
]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for page in ("reference/cli", "reference/rpc", "architecture", "benchmarks"):
        assert (tmp_path / page / "index.html").is_file()


def test_the_reference_names_every_flag() -> None:
    text = reference.cli()
    for command in COMMANDS:
        assert f"## octavo {command}" in text
    flags = {name for action in command_parser(["serve"])._actions for name in action.option_strings}
    assert len(flags) > 40
    assert flags - {"-h", "--help"} <= set(re.findall(r"--?[a-z][a-z0-9-]*", text))


def test_the_python_reference_has_every_name() -> None:
    text = reference.python()
    for name in octavo.engine.__all__:
        assert f"## {name}\n" in text or f"| `{name}` |" in text
    assert "### `async for ... in AsyncEngine.generate(prompt, params," in text


def test_supported_models_are_grouped_by_their_type() -> None:
    assert reference.MODELS.read_text() == reference.models(), "run tools/readme_figures.py"
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.+?) \| (yes)? ?\|$", reference.models(), flags=re.MULTILINE)
    table = {kind: (names, gguf) for kind, names, _, gguf in rows}
    assert "`Qwen/Qwen3-0.6B`" in table["qwen3"][0]
    assert table["qwen3"][1] == table["mistral"][1] == table["gemma3"][1] == "yes"
    assert not table["deepseek_v3"][1]


@pytest.mark.parametrize("cls", [EngineConfig, SamplingParams])
def test_every_setting_has_a_meaning(cls: type) -> None:
    names = set(cls.__dataclass_fields__)  # type: ignore[attr-defined]
    assert set(reference.meanings_of(cls)) == names


def test_the_reference_names_every_rpc() -> None:
    text = reference.rpc()
    for module in (generation_pb2, cache_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                assert f"| `{method.name}` |" in text


def test_metrics_have_a_type_and_a_meaning() -> None:
    rows = [line.split(" | ") for line in reference.metrics().splitlines() if line.startswith("| `octavo_")]
    assert len(rows) > 20
    assert all(row[1] in {"counter", "gauge", "histogram", "info"} and len(row[3]) > 10 for row in rows)


def test_the_readme_shows_the_figures_of_the_data() -> None:
    readme = (ROOT / "README.md").read_text()
    assert benchmarks.readme_with(benchmarks.readme_result()) == readme, "run tools/readme_figures.py"
    assert len(readme.splitlines()) <= 140


def test_links_to_files_that_are_no_page_become_their_names() -> None:
    text = pages.page("architecture.md")
    assert "](internals/block-manager.md" in text
    assert "](engine/" not in text


@pytest.mark.parametrize("path", [*DOCS, *PACKAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_in_the_repository_lead_to_files(path: Path) -> None:
    for target in re.findall(r"\]\(([^):#\s]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT / "docs")))
def test_commands_in_the_docs_exist(path: Path) -> None:
    for line in re.findall(r"^\$ octavo (.+)$", path.read_text(), flags=re.MULTILINE):
        words = line.split()
        command = words[:2] if words[0] in {"bench", "cache"} else words[:1]
        known = {name for action in command_parser(command)._actions for name in action.option_strings}
        assert {word for word in words if word.startswith("--")} <= known, line


@pytest.mark.parametrize("path", [*DOCS, *PACKAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_the_docs_name_exist(path: Path) -> None:
    if "lab" in path.parts:
        pytest.skip("a notebook keeps the names of its day")
    for name in re.findall(
        r"`((?:engine|kernels|block_manager|scheduler|proto|tests|tools)/[\w./-]+)`", path.read_text()
    ):
        assert "NAME" in name or (ROOT / name).exists() or (ROOT / f"{name}.py").exists(), name


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_readme_lists_or_names_are_beside_it(path: Path) -> None:
    text = path.read_text()
    listed = re.findall(r"^([a-z_]+\.py) +\S", text, flags=re.MULTILINE)
    for name in (*listed, *re.findall(r"`([a-z_]+\.py)`", text)):
        assert list(path.parent.rglob(name)), name
    if listed:
        assert set(listed) == {file.name for file in path.parent.glob("[!_]*.py")}


MEASURED = re.compile(
    r"\d (tokens/s|GB/s|GFLOP/s|us\b)|\d(\.\d+)? times as (fast|long)|p(50|95|99) of \d|\d\.\d\d \(\d\.\d\d"
)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs" / "guides").glob("*.md")), ids=lambda path: str(path.name)
)
def test_guides_have_no_figures_that_were_measured(path: Path) -> None:
    """Measured figures belong in ``docs/benchmarks/results``, with machine, date and command."""
    assert not MEASURED.search(path.read_text()), MEASURED.search(path.read_text())


def test_python_in_the_quick_start_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "quick-start.md").read_text(), flags=re.DOTALL
    )
    exec(compile(code, "quick-start.md", "exec"), {})
    assert capsys.readouterr().out.strip()
