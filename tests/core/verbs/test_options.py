"""Options of verbs and of raw formats: one declaration for the command line, Python and readers."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from table_files import flat, random_episodes, write_d4rl

import rbtool
from rbtool.core.declarations import READER_OPTIONS, ReaderOptions, declared
from rbtool.core.errors import UsageError
from rbtool.core.verbs.list import list_formats
from rbtool.core.verbs.options import ConvertOptions, DownloadOptions, VerbOptions

# Options objects of verbs describe what the functions of the verbs take.


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


# Options of raw formats: one declaration for the command line, Python and readers.


def test_python_and_the_command_line_have_the_same_options() -> None:
    assert [one.key for one in READER_OPTIONS] == list(ReaderOptions.__annotations__)


@pytest.mark.parametrize("call", [rbtool.convert, rbtool.inspect, rbtool.check, rbtool.download])
def test_an_option_that_is_not_there_is_a_type_error(call: Any, tmp_path: Path) -> None:
    file = write_d4rl(tmp_path / "a.hdf5", flat(random_episodes((3,))))
    arguments = (file, tmp_path / "out") if call is rbtool.convert else (file,)
    if call is rbtool.download:
        arguments = ("minari", "a/b-v0")
    with pytest.raises(TypeError, match="unexpected keyword argument 'horizont'; did you mean 'horizon'"):
        call(*arguments, horizont=3)


@pytest.mark.parametrize("given", [{"format": "d4rl"}, {"ends": "terminated"}, {"trust_pickle": True}])
def test_options_of_raw_datasets_are_refused_for_ted(given: dict[str, Any], tmp_path: Path) -> None:
    ted = rbtool.convert(write_d4rl(tmp_path / "a.hdf5", flat(random_episodes((3,)))), tmp_path / "ted").path
    option = {"format": "--from", "ends": "--ends", "trust_pickle": "--trust-pickle"}[next(iter(given))]
    for call in (rbtool.inspect, rbtool.check, lambda path, **more: rbtool.convert(path, tmp_path / "out", **more)):
        with pytest.raises(UsageError, match=f"{option} is about raw datasets"):
            call(ted, **given)


def test_a_format_can_be_named(tmp_path: Path) -> None:
    file = write_d4rl(tmp_path / "a.hdf5", flat(random_episodes((3, 2))))
    assert rbtool.inspect(file, format="d4rl").episodes == 2
    assert rbtool.check(file, format="d4rl").errors == 0
    assert rbtool.convert(file, tmp_path / "out", format="d4rl").request["source"] == "d4rl"
    with pytest.raises(UsageError, match="format 'd4r' is unknown; did you mean 'd4rl'"):
        rbtool.convert(file, tmp_path / "again", format="d4r")


def test_every_format_describes_itself() -> None:
    formats = {one.name: one for one in list_formats().formats}
    for declaration in declared():
        if declaration.reader is not None:
            one = formats[declaration.name]
            assert one.title
            assert one.found
            assert one.ends
            assert one.final in {"yes", "no", "where stored"}
    assert np.all([one.name in formats for one in declared() if one.source is not None])
