"""Shows the examples in docstrings as code: Markdown would take `>>>` for a quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class DoctestBlocks(griffe.Extension):
    """Puts a fence round every example of a docstring."""

    def on_object(self, *, obj: Any, **options: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
