"""Documents of the repository as pages of the site: one source, two readers.

The site shows the README that somebody finds who opens a folder. Links between such documents become links
between pages. A link to a file that is no page becomes the file's name.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

DOCUMENTS = {  # page of the site: document of the repository
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
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def page(name: str) -> str:
    """The text of a page that stands elsewhere in the repository. KeyError for other names."""
    document = DOCUMENTS[name]
    folder = posixpath.dirname(document)

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, mark, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or not path:
            return match.group(0)
        found = posixpath.normpath(posixpath.join(folder, path))
        if found.startswith("docs/"):
            found = found.removeprefix("docs/")
        elif found in (pages := {document: page for page, document in DOCUMENTS.items()}):
            found = pages[found]
        else:
            return text if text.startswith("`") else f"{text} (`{found}`)"
        return f"[{text}]({posixpath.relpath(found, posixpath.dirname(name) or '.')}{mark}{anchor})"

    parts = re.split(r"(```.*?```)", (ROOT / document).read_text("utf-8"), flags=re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)
