"""Hooks for MkDocs that add generated pages and documents from outside of ``docs``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # MkDocs loads this file by its path

from docs_site import benchmarks, pages, reference

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

GENERATED = {
    "reference/cli.md": reference.cli,
    "reference/configuration.md": reference.config,
    "reference/metrics.md": reference.metrics,
    "reference/python.md": reference.python,
    "reference/rpc.md": reference.rpc,
    "benchmarks/index.md": benchmarks.page,
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for name, make in GENERATED.items():
        files.append(File.generated(config, name, content=make()))
    for name in pages.DOCUMENTS:
        files.append(File.generated(config, name, content=pages.page(name)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Return a page's text with links to repository files changed into links to pages."""
    return pages.linked(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)
