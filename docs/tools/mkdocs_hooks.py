"""Hooks of MkDocs: add the generated pages to the site, and adapt links to CONTRIBUTING.md."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def _generated_pages() -> Any:
    """Import the module of generated pages; MkDocs resets the import path after it has loaded its hooks."""
    here = Path(__file__).resolve().parent
    for folder in (here, here.parents[1] / "tests/tools"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    return importlib.import_module("generated_pages")


def on_files(files: Any, config: Any) -> Any:
    """Add each generated page as a file of the site."""
    generated_pages = _generated_pages()
    from mkdocs.structure.files import File

    for path, write in generated_pages.PAGES.items():
        files.append(File.generated(config, path, content=write()))
    return files


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Change links to CONTRIBUTING.md to its page inside the site."""
    return markdown.replace("](../CONTRIBUTING.md)", "](contributing.md)")
