from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.executor.mlx_lm_import import Absent, copy_without, defer

NAME = "octavo_deferred_example"
INIT = """
__version__ = "7"
import {name}_counter as counter
counter.runs += 1
if counter.fails:
    raise RuntimeError("not today")
from .part import value
answer = value + 1
"""
PART = "from nowhere_at_all import Tokenizer\nimport json\nvalue = 41\ndef make(): return Tokenizer()\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / NAME
    folder.mkdir()
    (folder / "__init__.py").write_text(INIT.format(name=NAME))
    (folder / "part.py").write_text("value = 41\n")
    (folder / "tokens.py").write_text(PART)
    (tmp_path / f"{NAME}_counter.py").write_text("runs = 0\nfails = False\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.startswith(NAME)]:
        del sys.modules[name]


def test_a_deferred_package_is_imported_once_at_first_use(package: Path) -> None:
    counter = importlib.import_module(f"{NAME}_counter")
    defer(NAME)
    part = importlib.import_module(f"{NAME}.part")
    deferred = sys.modules[NAME]
    assert (part.value, counter.runs, deferred.__file__) == (41, 0, str(package / "__init__.py"))
    assert deferred.part is part
    assert not hasattr(deferred, "__wrapped__")
    assert counter.runs == 0
    assert (deferred.__version__, deferred.answer, counter.runs) == ("7", 42, 1)
    assert not hasattr(deferred, "nothing")
    defer(NAME)
    assert sys.modules[NAME] is deferred
    assert counter.runs == 1


@pytest.mark.usefixtures("package")
def test_a_failed_import_can_be_repeated() -> None:
    counter: Any = importlib.import_module(f"{NAME}_counter")
    counter.fails = True
    defer(NAME)
    for runs in (1, 2):
        with pytest.raises(RuntimeError, match="not today"):
            _ = sys.modules[NAME].answer
        assert counter.runs == runs
    counter.fails = False
    assert sys.modules[NAME].answer == 42


@pytest.mark.usefixtures("package")
def test_a_copy_lacks_only_the_excluded_names() -> None:
    copy = copy_without(f"{NAME}.tokens", ("nowhere_at_all",))
    assert (copy.value, copy.json, copy.Tokenizer) == (41, importlib.import_module("json"), Absent)
    assert f"{NAME}.tokens" not in sys.modules
    assert "nowhere_at_all" not in sys.modules
    with pytest.raises(TypeError, match="cannot load tokenizers or download models"):
        copy.make()
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        importlib.import_module(f"{NAME}.tokens")
    part = importlib.import_module(f"{NAME}.part")
    assert copy_without(f"{NAME}.part", ()) is part


def test_missing_packages_are_named() -> None:
    with pytest.raises(ImportError, match="octavo_is_not_there"):
        defer("octavo_is_not_there")
    with pytest.raises(ImportError, match="octavo_is_not_there"):
        copy_without("octavo_is_not_there.part", ())


FRESH = """
import sys
import octavo.engine.executor.load.load
from octavo.engine.executor import mlx_lm_import
unused = {"transformers", "huggingface_hub", "mlx_lm.utils", "mlx_lm.tokenizer_utils", "mlx_vlm", "PIL"}
assert not unused & set(sys.modules)
assert mlx_lm_import.utils.load_model.__module__ == "mlx_lm.utils"
import mlx_lm, mlx_lm.models.base
assert mlx_lm.models.base is mlx_lm_import.base
from mlx_lm import load
import mlx_lm.utils
assert mlx_lm.utils is not mlx_lm_import.utils and mlx_lm.utils.load is load
assert "transformers" in sys.modules and mlx_lm.utils.TokenizerWrapper is not mlx_lm_import.Absent
"""


def test_plain_mlx_lm_is_whole_in_the_same_process() -> None:
    subprocess.run([sys.executable, "-c", FRESH], check=True)
