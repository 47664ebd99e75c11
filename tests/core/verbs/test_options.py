"""Options objects of verbs describe what the functions of the verbs take."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest

import rbtool
from rbtool.core.verbs.options import ConvertOptions, DownloadOptions, VerbOptions

VERBS: list[tuple[Callable[..., Any], type[VerbOptions]]] = [
    (rbtool.convert, ConvertOptions),
    (rbtool.download, DownloadOptions),
]


@pytest.mark.parametrize(("verb", "options"), VERBS)
def test_a_verb_takes_its_options(verb: Callable[..., Any], options: type[VerbOptions]) -> None:
    function = inspect.unwrap(verb)
    keywords = {
        name: (get_type_hints(function)[name], one.default)
        for name, one in inspect.signature(function).parameters.items()
        if one.kind is inspect.Parameter.KEYWORD_ONLY and name != "progress"
    }
    types = get_type_hints(options)
    assert keywords == {one.name: (types[one.name], one.default) for one in dataclasses.fields(options)}


def test_recorded_options_are_those_that_are_set() -> None:
    assert ConvertOptions(skip_bad=True, force=True).recorded() == {"skip_bad": True}
    assert ConvertOptions(force=True).recorded() == {}


def test_raw_options_are_those_that_are_set() -> None:
    assert ConvertOptions(episodes="0:2", final_step="drop", force=True).raw() == {
        "episodes": "0:2", "final_step": "drop",
    }  # fmt: skip
