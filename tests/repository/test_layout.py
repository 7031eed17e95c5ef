from __future__ import annotations

import contextlib
import importlib.util
import io
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import octavo
from octavo.block_manager import digests
from octavo.engine.cli import COMMANDS, LAB, main
from octavo_lab.commands.bench import BENCHES

ROOT = Path(__file__).resolve().parents[2]
LINKS = {
    "block_manager": "../../block_manager", "engine": "../../engine", "integrations": "../../integrations",
    "kernels": "../../kernels", "proto": "../../proto", "scheduler": "../../scheduler",
    "v1": "../../proto/octavo/v1",
}  # fmt: skip
SOURCES = ("block_manager", "engine", "integrations", "kernels", "lab", "proto", "scheduler", "tools")
NO_MIRRORS = {"tests/repository", "tests/chaos", "tests/deploy"}  # folders that test no Python package
TESTED_ELSEWHERE = {"tools/docs_site": "tests/repository/test_docs.py", "proto/octavo/v1": "tests/proto"}
TEXT = {".py", ".md", ".toml", ".sh", ".yaml", ".yml", ".proto", ".cpp", ".h", ".txt", ".service", ""}


def tracked(*patterns: str) -> list[Path]:
    """Return the files in git, or all files in an unpacked archive."""
    if not (ROOT / ".git").exists():
        return [
            path for pattern in patterns for path in sorted(ROOT.rglob(pattern)) if ".venv" not in path.parts
        ]
    done = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("name", sorted(LINKS))
def test_the_package_is_made_of_symlinks_to_the_folders(name: str) -> None:
    link = ROOT / "src" / "octavo" / name
    assert link.is_symlink()
    assert str(link.readlink()) == LINKS[name]
    assert link.is_dir()


def test_git_keeps_them_as_symlinks() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing to ask git about")
    listing = subprocess.run(
        ["git", "ls-files", "-s", "src/octavo"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    modes = {
        line.split("\t")[1].removeprefix("src/octavo/"): line.split()[0] for line in listing.splitlines()
    }
    assert {name for name, mode in modes.items() if mode == "120000"} == set(LINKS)


def test_tools_find_every_module_under_its_name_in_the_package() -> None:
    """Import graphs, editors and coverage look for modules by these names."""
    packages, found = [("octavo", ROOT / "src" / "octavo")], set[str]()
    while packages:
        package, folder = packages.pop()
        for _, name, is_package in pkgutil.iter_modules([str(folder)]):
            found.add(f"{package}.{name}")
            packages += [(f"{package}.{name}", folder / name)] * is_package
    files = [path.relative_to(ROOT) for path in tracked("*.py") if "_pb2" not in path.name]
    modules = {
        f"octavo.{file.with_suffix('').as_posix().replace('/', '.').removesuffix('.__init__')}"
        for file in files
        if file.parts[0] in LINKS and "/v1/" not in file.as_posix()  # linked as octavo.v1
    }
    assert len(modules) > 300
    assert modules <= found
    spec = importlib.util.find_spec("octavo.block_manager.digests")
    assert spec is not None
    assert spec.origin == str(ROOT / "src" / "octavo" / "block_manager" / "digests.py")
    assert digests.pack.__code__.co_filename == spec.origin
    assert digests.pack.__module__ == spec.name


def test_tests_mirror_the_folders_of_their_sources() -> None:
    modules = [path for folder in SOURCES for path in tracked(f"{folder}/*.py", f"{folder}/**/*.py")]
    packages, in_packages = (
        {path.parent.relative_to(ROOT).as_posix() for path in paths}
        for paths in (modules, [path for path in modules if path.name != "__init__.py"])
    )
    folders = {path.parent.relative_to(ROOT).as_posix() for path in tracked("tests/**/test_*.py")}
    mirrored = {folder.removeprefix("tests/") for folder in folders - NO_MIRRORS}
    assert mirrored <= packages
    assert in_packages - TESTED_ELSEWHERE.keys() <= mirrored
    assert all((ROOT / place).exists() for place in TESTED_ELSEWHERE.values())


def test_the_test_files_that_begin_first_exist() -> None:
    text = (ROOT / "tests" / "conftest.py").read_text()
    named = re.findall(r'"(tests/[\w/]+\.py)"', text.partition("LONGEST_FIRST")[2])
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_every_path_of_make_quick_exists() -> None:
    quick = (ROOT / "Makefile").read_text().partition("QUICK := ")[2].partition("\nPYTEST_ARGS")[0]
    named = re.findall(r"tests/[\w/.]+", quick)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_make_runs_every_file_with_slow_cases() -> None:
    found = re.search(r"grep -rlE '([^']+)' tests", (ROOT / "Makefile").read_text())
    assert found is not None
    files = {file: file.read_text() for file in tracked("tests/**/test_*.py")}
    marked = {file for file, text in files.items() if "mark.slow" in text or "mark.few(" in text}
    assert len(marked) > 40
    assert [file for file in marked if not re.search(found[1], files[file])] == []


def test_every_relative_link_in_the_docs_exists() -> None:
    # MkDocs checks the site's pages (test_docs.py), because they link to generated pages.
    documents = [document for document in tracked("*.md") if ROOT / "docs" not in document.parents]
    assert ROOT / "README.md" in documents
    checked = 0
    for document in documents:
        text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (document.parent / path).resolve() if path else document
            assert file.exists(), f"{document.relative_to(ROOT)} links to {target}"
            if anchor:
                assert anchor in anchors(file), f"{document.relative_to(ROOT)} links to {target}"
            checked += 1
    assert checked >= 10


def anchors(document: Path) -> set[str]:
    """Return the heading IDs that GitHub makes."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_flag_and_command_the_docs_name_exists() -> None:
    commands = [(name,) for name in COMMANDS] + [("bench", name) for name in BENCHES]
    known = {flag for command in commands for flag in flags_in(octavo_help(*command))}
    assert len(known) > 20
    for name in ("README.md", "ARCHITECTURE.md", "deploy/README.md", "deploy/octavo.service"):
        text = (ROOT / name).read_text()
        used = {flag for code in re.findall(r"`(--[^`]+)`", text) for flag in flags_in(code)}
        for line in text.splitlines():
            if re.search(r"octavo (serve|generate|bench|plan|doctor)|SERVE_ARGS|OCTAVO_FLAGS", line):
                used |= flags_in(line)
        assert used <= known, f"{name} names {sorted(used - known)}, which no command knows"
        spoken = set(re.findall(r"(?:^|`|\$ |bin/)octavo (bench [a-z]+|[a-z]+)", text, flags=re.MULTILINE))
        assert spoken - {"ready"} <= {" ".join(command) for command in commands}, name


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))


def octavo_help(*command: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*command, "--help"]) == 0
    return out.getvalue()


def test_no_path_of_the_machine_it_was_written_on() -> None:
    # Built from parts, so that this file does not contain what it forbids.
    forbidden = re.compile(
        r"(?<![\w.])/(?:" + "|".join(("wo" + "rk", "ro" + "ot", "ho" + "me/[a-z]+")) + r")/"
    )
    for path in tracked("*"):
        if path.suffix in TEXT and not path.is_symlink():
            found = forbidden.search(path.read_text())
            assert not found, f"{path.relative_to(ROOT)} names {found.group()}"


def test_nothing_is_left_to_do_later() -> None:
    marks = re.compile(
        r"\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b|NotImplemented" + "Error"
    )
    for path in tracked("*"):
        if path.suffix in TEXT and not path.is_symlink() and "_pb2" not in path.name:
            found = marks.search(path.read_text())
            assert not found, f"{path.relative_to(ROOT)} says {found.group()}"


def test_the_laboratory_lists_its_packages() -> None:
    project = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())
    folders = [
        path.parent.relative_to(ROOT / "lab") for path in tracked("lab/__init__.py", "lab/**/__init__.py")
    ]
    names = {".".join(("octavo_lab", *folder.parts)) for folder in folders}
    assert set(project["tool"]["setuptools"]["packages"]) == names
    assert project["project"]["version"] == octavo.__version__


def test_without_the_laboratory_its_commands_say_how_to_get_it() -> None:
    code = (
        "import sys; sys.modules['octavo_lab'] = None; from octavo.engine.cli import main; sys.exit(main())"
    )
    for command in LAB:
        done = subprocess.run(
            [sys.executable, "-c", code, command], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert f"octavo {command}" in done.stderr
        assert "pip install ./lab" in done.stderr
