from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from octavo_lab.architectures import survey as surveys
from octavo_lab.architectures.configurations import DIFFERENT, configuration
from octavo_lab.architectures.examine import architectures

TABLE = Path(__file__).resolve().parents[3] / "docs" / "architectures.md"


NO_MODEL = re.compile(r"^\| `(?P<name>[^`]+)` \| (?P<tier>[a-z ]+) \| (?P<attention>[^|]*) \|", re.MULTILINE)


def test_known_differences_are_of_architectures_that_exist() -> None:
    assert set(DIFFERENT) <= set(architectures())


def test_the_table_in_the_docs_has_every_architecture() -> None:
    """The table is made by ``octavo models --markdown``."""
    assert [row["name"] for row in NO_MODEL.finditer(TABLE.read_text())] == architectures()


def test_nothing_is_gathered_and_little_refused() -> None:
    rows = [line.split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    reasons = {row[0].strip("| `"): row[4] for row in rows if row[1] not in ("paged", "not tried")}
    assert sorted(reasons) == ["bitnet", "deepseek_v41", "muse_spark"]
    assert {name for name, reason in reasons.items() if "No Metal back-end" in reason} == {
        "bitnet",
        "muse_spark",
    }
    assert "uses the cache LayerCache" in reasons["deepseek_v41"]
    assert "gather" not in {row[1] for row in rows}


WORKER = """
import json, sys, time
for name in sys.argv[2:]:
    if name == "hangs":
        time.sleep(600)
    if name == "crashes":
        sys.exit("out of luck")
    print(json.dumps({"architecture": name, "tier": "paged"}), flush=True)
"""


def test_models_that_hang_or_crash_do_not_stop_the_survey(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker_of_this_test.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(surveys, "WORKER", "worker_of_this_test")
    names: Sequence[str] = ("a", "hangs", "b", "crashes", "c")
    found = list(surveys.survey(names, time_limit=5))
    assert [one.architecture for one in found] == list(names)
    assert [one.tier for one in found] == ["paged", "refused", "paged", "refused", "paged"]
    assert "longer than 5 s" in found[1].reason
    assert "status 1: out of luck" in found[3].reason


@pytest.mark.slow
def test_the_table_in_the_docs_is_true() -> None:
    tiers = {row["name"]: row["tier"] for row in NO_MODEL.finditer(TABLE.read_text())}
    found = {one.architecture: one.tier for one in surveys.survey(architectures())}
    differing = {name for name in tiers if found.get(name) != tiers[name]}
    assert found.keys() == tiers.keys()
    # With AVX2's rounding, this model's router chooses other experts.
    assert differing <= {"bailing_moe_v3"}


def test_a_missing_tiny_configuration_has_a_reason() -> None:
    with pytest.raises(ValueError, match="packed weights"):
        configuration("prism_hadamard_qwen35")
