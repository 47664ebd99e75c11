"""Options of streams, and what `inspect` shows of one."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from ..core.errors import UsageError
from ..core.progress import counted
from ..core.progress import readable_size as size
from .output import Output
from .text import TITLE, Line, Styled, Table, folded, kind_cells, titled

if TYPE_CHECKING:
    from ..core.storages.dataset import StreamStorage
    from ..core.verbs.streams import StreamResult

_PANEL = "Streams"

Streaming: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--streaming",
        help="Fetch shards of hf://OWNER/NAME, s3:// or gs://BUCKET/FOLDER, a URL or SOURCE:ID as they are needed.",
        rich_help_panel=_PANEL,
    ),
]
CacheSize: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--cache-size",
        metavar="SIZE",
        help="Most that shards take on this disk, like 2GB. Default: $RBTOOL_CACHE_SIZE, else 8 GiB.",
        rich_help_panel=_PANEL,
    ),
]


def stream_opener(
    dataset: str, root: str | None, cache_size: str | None, options: Mapping[str, Any]
) -> Callable[[], StreamStorage]:
    """Return a function that opens a dataset as a stream, with options of its reader."""
    from ..core.results import given_options

    given = given_options(options)

    def opened() -> StreamStorage:
        from ..core.streams.shards import open_stream  # lazy: loads torch, which takes seconds

        return open_stream(dataset, root, cache_size, given)

    return opened


def refuse_stream_options(cache_size: str | None, options: Mapping[str, Any]) -> None:
    """Raise UsageError for options that only streams have, where none is asked for."""
    given = [name for name, value in {"cache_size": cache_size, **options}.items() if value not in (None, False)]
    if given:
        option = given[0].replace("_", "-")
        raise UsageError(f"--{option} is set, expected with --streaming only", hint="add --streaming, or leave it out")


def refuse_without_stream(options: Mapping[str, Any]) -> None:
    """Raise UsageError for options of datasets on this disk, which a stream does not have."""
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"--{name} is for datasets on this disk, and a stream is not", hint="leave it out")


def inspect_stream(
    root: str | None, cache_size: str | None, options: Mapping[str, Any], dataset: str, out: Output
) -> int:
    """Show what is in a stream."""
    from ..core.verbs.streams import inspect_stream as run

    result = run(stream_opener(dataset, root, cache_size, options))
    out.show(result, [result.address], stream_lines)
    if not any(options.values()):  # what to type next would need the same options
        out.suggest(f"rbtool sample {shlex.quote(dataset)} --streaming")
    return 0


def stream_lines(result: StreamResult, width: int | None) -> Iterator[Line]:
    """Return how much there is, as far as it is known, what is in the first shard, and the fields."""
    counts = [counted(result.shards, "shard")]
    counts += [counted(result.steps, "step")] if result.steps is not None else []
    counts += [counted(result.episodes, "episode")] if result.episodes is not None else []
    counts += [size(result.bytes)] if result.bytes is not None else []
    yield from folded([Styled(result.address, "bold"), f"   stream   {'   '.join(counts)}"], width, 2)
    first = f"the first has {counted(result.shard_steps, 'step')} in {counted(result.shard_episodes, 'episode')}"
    yield from titled("shards", first, width)
    yield [Styled("fields", "dim")]
    rows: list[Line] = [[f"  {one.key}", *kind_cells(one.dtype, one.shape, one.role)] for one in result.fields]
    yield from Table(rows, indent=TITLE).lines(width)
    for sentence in result.lacking:
        yield from titled("left out", sentence, width, "yellow")
