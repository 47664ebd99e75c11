"""Extensions of griffe that adapt docstrings and signatures for the pages of the Python API."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class DoctestBlocks(griffe.Extension):
    """Puts a fence around every example of a docstring, because Markdown would take `>>>` for a quotation."""

    def on_object(self, *, obj: Any, **options: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)


class VerbArguments(griffe.Extension):
    """Shows the arguments of a verb instead of the options object whose fields they are."""

    def on_function(self, *, func: Any, **options: Any) -> None:
        if any(str(one.value).startswith("takes(") for one in func.decorators):
            verb = getattr(importlib.import_module(func.module.path), func.name)
            func.parameters = griffe.Parameters(*map(_parameter, inspect.signature(verb).parameters.values()))


def _parameter(found: inspect.Parameter) -> Any:
    return griffe.Parameter(
        found.name,
        annotation=inspect.formatannotation(found.annotation),
        kind=griffe.ParameterKind(found.kind.description),
        default=None if found.default is found.empty else repr(found.default),
    )
