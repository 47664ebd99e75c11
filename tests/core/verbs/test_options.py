"""The arguments of a verb are defined once: the function, the command line and readers have the same."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer.main
from cases import each
from table_files import flat, random_episodes, write_d4rl

import rbtool
from rbtool.cli.app import app
from rbtool.core.declarations import ReaderOptions, declared
from rbtool.core.errors import UsageError
from rbtool.core.format.converter import Reader, Source
from rbtool.core.format.locate import reader_class, source_class
from rbtool.core.options import PreprocessOptions, RawOptions, VerbOptions
from rbtool.core.verbs import options as of
from rbtool.core.verbs.list import list_formats

VERBS: dict[str, tuple[Callable[..., Any], type[VerbOptions]]] = {
    "convert": (rbtool.convert, of.ConvertOptions),
    "download": (rbtool.download, of.DownloadOptions),
    "merge": (rbtool.merge, of.MergeOptions),
    "split": (rbtool.split, of.SplitOptions),
    "checkpoint save": (rbtool.checkpoint.save, of.SaveOptions),
    "checkpoint load": (rbtool.checkpoint.load, of.LoadOptions),
    "record": (rbtool.record, of.RecordOptions),
    "export": (rbtool.export, of.ExportOptions),
    "upload": (rbtool.upload, of.UploadOptions),
    "frames": (rbtool.frames, of.FramesOptions),
    "sample": (rbtool.sample, of.SampleOptions),
    "preprocess": (rbtool.preprocess, PreprocessOptions),
}


@pytest.mark.parametrize(("verb", "options"), VERBS.values(), ids=VERBS)
def test_a_verb_takes_the_fields_of_its_options(verb: Callable[..., Any], options: type[VerbOptions]) -> None:
    types, fields = get_type_hints(options), {one.name: one for one in dataclasses.fields(options)}
    found = inspect.signature(verb).parameters
    assert found.keys() == fields.keys()
    for name, one in found.items():
        assert (one.annotation, one.default is one.empty) == (types[name], fields[name].default is dataclasses.MISSING)
        assert one.default in (one.empty, fields[name].default)
        assert (one.kind is one.KEYWORD_ONLY) == fields[name].kw_only
    assert get_type_hints(verb)["return"].kind


@each("verb", VERBS)
def test_every_option_is_on_the_command_line(verb: str) -> None:
    command: Any = typer.main.get_command(app)
    for word in verb.split():
        command = command.commands[word]
    flags = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
    for name, about in VERBS[verb][1].described().items():
        assert {*(about.flag or f"--{name.replace('_', '-')}").replace("/", " ").split()} <= flags


def test_recorded_and_raw_options_are_those_that_are_set() -> None:
    assert of.ConvertOptions("a", "b", skip_bad=True, force=True).recorded() == {"skip_bad": True}
    assert of.ConvertOptions("a", "b", force=True).recorded() == {}
    raw = of.ConvertOptions("a", "b", episodes="0:2", final_step="drop", force=True).raw()
    assert raw == {"episodes": "0:2", "final_step": "drop"}


def test_arguments_that_are_missing_or_too_many_name_the_verb() -> None:
    with pytest.raises(TypeError, match=r"^merge\(\): missing a required argument: 'dest'$"):
        rbtool.merge(["a", "b"])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^merge\(\): too many positional arguments$"):
        rbtool.merge(["a", "b"], "c", "union")  # type: ignore[misc]


def test_python_and_the_command_line_have_the_same_options() -> None:
    assert list(RawOptions.described()) == list(ReaderOptions.__annotations__)


@pytest.mark.parametrize("call", [rbtool.convert, rbtool.inspect, rbtool.check, rbtool.download])
def test_an_unknown_option_is_a_type_error(call: Any) -> None:
    arguments = ("a.hdf5", "out") if call is rbtool.convert else ("a.hdf5",)
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
    assert list(formats) == [declaration.name for declaration in declared()]
    for declaration in declared():
        one = formats[declaration.name]
        assert one.title
        assert one.exported == (declaration.sink is not None)
        assert one.read or one.exported
        if one.read:
            assert one.found
            assert one.ends
            assert one.final in {"yes", "no", "where stored"}
        if declaration.reader is not None:
            reader = reader_class(one.name)
            assert one.keeps_video == (reader.videos_of is not Reader.videos_of)
        if declaration.source is not None:
            assert formats[declaration.name].streams == (source_class(declaration.name).shards is not Source.shards)
