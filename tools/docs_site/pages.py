"""Documents of the repository as pages of the site, with their links changed."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

DOCUMENTS = {
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "operations/index.md": "deploy/README.md",
    "operations/router.md": "deploy/router/README.md",
    "internals/block-manager.md": "block_manager/README.md",
    "internals/kernels.md": "kernels/README.md",
    "internals/disk.md": "engine/kv_store/README.md",
    "internals/demo-model.md": "tools/demo_model/README.md",
    "benchmarks/peers.md": "tests/bench/peers/README.md",
}
SOURCES = {
    "docs/benchmarks/results": "benchmarks/index.md",
    "engine/__init__.py": "reference/python.md",
    "engine/api/config.py": "reference/configuration.md",
    "engine/api/sampling_params.py": "reference/configuration.md",
    "engine/arguments/options.py": "reference/cli.md",
    "engine/observability/prometheus.py": "reference/metrics.md",
    "proto/octavo/v1/generation.proto": "reference/rpc.md",
}
PAGES = SOURCES | {document: page for page, document in DOCUMENTS.items()}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def page(name: str) -> str:
    """Return the text of a page whose document is outside of ``docs``. Raises KeyError for other names."""
    return linked((ROOT / DOCUMENTS[name]).read_text("utf-8"), DOCUMENTS[name], name)


def linked(text: str, document: str, name: str) -> str:
    """Return the text of a document with its links changed for the page ``name`` of the site."""
    folder = posixpath.dirname(document)

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, mark, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or not path:
            return match.group(0)
        found = posixpath.normpath(posixpath.join(folder, path))
        if found in PAGES:
            found = PAGES[found]
        elif found.startswith("docs/"):
            found = found.removeprefix("docs/")
        else:
            return text if text.startswith("`") else f"{text} (`{found}`)"
        return f"[{text}]({posixpath.relpath(found, posixpath.dirname(name) or '.')}{mark}{anchor})"

    parts = re.split(r"(```.*?```)", text, flags=re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)
