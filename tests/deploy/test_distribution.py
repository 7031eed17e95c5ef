from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

import homebrew_formula
from octavo.engine.cli import command_parser

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_build_and_the_package_require_one_mlx_version() -> None:
    pins = {
        found[1]
        for requirement in (*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"])
        if (found := re.match(r"mlx(?:\[cpu\])?==([\d.]+);", requirement))
    }
    assert len(pins) == 1


def test_wheels_leave_libmlx_to_the_package_mlx() -> None:
    settings = PROJECT["tool"]["cibuildwheel"]
    exclude = "auditwheel repair --exclude libmlx.so "
    assert settings["linux"]["repair-wheel-command"].startswith(exclude)
    assert exclude.replace("auditwheel", 'auditwheel"') in (ROOT / "tools" / "wheel.sh").read_text()


@pytest.mark.parametrize(
    ("platform", "arch", "tag"),
    [
        ("linux", "x86_64", "manylinux_x86_64"),
        ("linux", "aarch64", "manylinux_aarch64"),
        ("macos", "arm64", "macosx_arm64"),
    ],
)
def test_cibuildwheel_reads_its_settings(platform: str, arch: str, tag: str) -> None:
    program = shutil.which("cibuildwheel") or shutil.which(
        "cibuildwheel", path=str(Path(sys.executable).parent)
    )
    if program is None:
        pytest.skip("cibuildwheel is not installed; see the extra `dist`")
    command = [program, "--print-build-identifiers", "--platform", platform, "--archs", arch, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"cp{version}-{tag}" for version in (311, 312, 313, 314)]


def test_the_image_has_the_pythons_that_are_built_for() -> None:
    image = (ROOT / "deploy" / "wheels" / "Dockerfile").read_text()
    for version in re.findall(r"cp(\d+)-\*", PROJECT["tool"]["cibuildwheel"]["build"]):
        assert f"/opt/python/cp{version}-cp{version}" in image


def test_workflows_run_commands_that_exist() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    makefile = (ROOT / "Makefile").read_text()
    targets = [word for run in steps for word in re.findall(r"^make (.+)$", run, re.M)]
    assert targets
    for target in " ".join(targets).split():
        assert re.search(rf"^{target}:", makefile, re.M), target
    assert any("docker build -t octavo-manylinux:local deploy/wheels" in run for run in steps)
    assert PROJECT["tool"]["cibuildwheel"]["linux"]["manylinux-x86_64-image"] == "octavo-manylinux:local"


def test_the_formula_installs_the_release(tmp_path: Path) -> None:
    sdist = tmp_path / "octavo-1.2.3.tar.gz"
    sdist.write_bytes(b"contents")
    url = "https://example.org/octavo/releases/1.2.3/octavo-1.2.3.tar.gz"
    text = homebrew_formula.formula(sdist, url)
    assert f'url "{url}"' in text
    assert f'sha256 "{hashlib.sha256(b"contents").hexdigest()}"' in text
    assert 'version "1.2.3"' in text
    assert 'homepage "https://example.org/octavo"' in text
    assert f'license "{PROJECT["project"]["license"]}"' in text
    command = re.search(r'run \[opt_bin/"octavo", (.+)\]', text)
    assert command is not None
    assert text.count("\n  end\n") == 3
    assert "{" not in re.sub(r"#\{\w+\}", "", text)
    words = re.findall(r'"([^"]+)"', command[1])
    assert words[0] == "serve"
    assert command_parser(words[:1]).parse_args(words[1:]).http is not None


@pytest.mark.parametrize(
    ("name", "url", "hint"),
    [
        ("octavo.whl", "https://x/y", "octavo-VERSION.tar.gz"),
        ("octavo-1.tar.gz", "http://x/y", "https://"),
        ("octavo-1.tar.gz", 'https://x/"y', "https://"),
    ],
)
def test_missing_releases_are_reported(tmp_path: Path, name: str, url: str, hint: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=hint):
        homebrew_formula.formula(tmp_path / name, url)
