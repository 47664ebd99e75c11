"""`rbtool download`, `convert` and `export`: datasets into TED, and out of it."""

from __future__ import annotations

import contextlib
import enum
import shlex
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from ..core.declarations import declared, declared_sources
from ..core.progress import counted
from ..core.progress import readable_size as size
from .failures import stdout_to_stderr
from .help import EXAMPLE_SOURCE, SOURCE, STORED, Example
from .options import (
    Compress,
    Dataset,
    DryRun,
    EngineName,
    Episodes,
    FinalStep,
    FinalStepName,
    Force,
    FormatLayout,
    FromFormat,
    RawOptions,
    Root,
    SkipBad,
    show_published,
    verb,
)
from .output import Output

if TYPE_CHECKING:
    from ..core.verbs.download import DownloadResult

NumWorkers: TypeAlias = Annotated[
    int,
    typer.Option("--num-workers", metavar="N", help="Processes that read and write a raw dataset; 0: this one alone."),
]

_CACHES = ", ".join(f"${one.variable}" for one in declared() if one.variable)

DOWNLOAD_EXAMPLES = (
    Example(
        f"rbtool download {SOURCE} {EXAMPLE_SOURCE.example[1]}",
        "fetch, verify, convert; the path is on stdout",
    ),
    Example(
        f"rbtool download {SOURCE}:{EXAMPLE_SOURCE.example[0]} --dry-run",
        "how much there is to fetch, and the room for it",
    ),
    Example(
        f"rbtool download {SOURCE} cartpole/scripted-v0 --local",
        f"from the local {EXAMPLE_SOURCE.title} cache, without the network",
    ),
    Example(
        "rbtool download d4rl hopper-medium-v2 --dry-run", "one of D4RL's datasets: neither gym nor d4rl is needed"
    ),
    Example(f"rbtool download {SOURCE}:pendulum/random-v0 --local --episodes 0:3", "only some of its episodes"),
    Example(
        "rbtool download hf://me/cartpole", "the same files that rbtool upload put there; hf:me/cartpole from then on"
    ),
    Example(
        f'rbtool inspect "$(rbtool download {SOURCE} cartpole/scripted-v0 --local -q)" --json',
        "in a pipeline: -q prints the path, and nothing else",
    ),
)


def add(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    verb(app, "download", DOWNLOAD_EXAMPLES)(download)
    verb(app, "convert", CONVERT_EXAMPLES)(convert)
    verb(app, "export", EXPORT_EXAMPLES)(export)


def download(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help=f"Where from: {declared_sources()}. Or SOURCE:ID in one word, or hf://OWNER/NAME."
        ),
    ],
    id: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help=f"Which dataset: {EXAMPLE_SOURCE.example[0]}, or words that name it."),
    ] = None,
    *,
    out: Output,
    local: Annotated[
        bool,
        typer.Option("--local", help=f"Take it from the source's own cache ({_CACHES}); no network."),
    ] = False,
    root: Root = None,
    episodes: Episodes = None,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="REV", help="A branch, tag or commit of the remote.")
    ] = None,
    exact_id: Annotated[
        bool, typer.Option("--exact-id", help="Take the id as it is: fill in no version, find no newer name.")
    ] = False,
    frozen: Annotated[
        bool, typer.Option("--frozen", help="Fail if the remote has other files now than those it was made from.")
    ] = False,
    layout: FormatLayout = None,
    compress: Compress = None,
    final_step: FinalStep = FinalStepName.AUTO,
    num_workers: NumWorkers = 0,
    skip_bad: SkipBad = False,
    keep_source: Annotated[bool, typer.Option("--keep-source", help="Keep the original files, too.")] = False,
    force: Force = False,
    dry_run: DryRun = False,
    raw: RawOptions,
) -> None:
    """Fetch a dataset, verify it, and store it as TED.

    It is stored as SOURCE/ID below the root, and is named SOURCE:ID from then on. What was fetched before is not
    fetched again, and an interrupted download resumes where it stopped. hf://OWNER/NAME is a dataset that was uploaded
    to the Hugging Face hub, which comes as it is.
    """
    from ..core.format.locate import substitution_text
    from ..core.verbs.download import download as run

    with out.progress() as progress:
        result = run(
            source, id, local=local, root=root, episodes=episodes, revision=revision, force=force, dry_run=dry_run,
            keep_source=keep_source, layout=layout and layout.value, compress=compress or (), exact_id=exact_id,
            frozen=frozen, final_step=final_step.value, num_workers=num_workers, skip_bad=skip_bad,
            progress=progress, **raw,
        )  # fmt: skip
    if out.quiet and result.resolved == "words":  # with -q no note has named it
        out.warn(f"{substitution_text(result.asked, result.id)} (disable with --exact-id)")
    _show_fetch(out, result)
    show_published(out, result)


def _show_fetch(out: Output, result: DownloadResult) -> None:
    fetch = result.fetch
    if fetch is not None and result.dry_run:
        there = f" ({size(fetch.bytes_present)} of it is there already)" if fetch.bytes_present else ""
        files = f"{counted(fetch.files, 'file')}, {size(fetch.bytes)}"
        out.summary(f"to fetch: {files} from {result.fetched_from}{there}; {size(fetch.bytes_free)} free")
    if result.originals is not None:
        out.summary(f"originals: {result.originals}")


CONVERT_EXAMPLES = (
    Example(
        f"rbtool convert ./{SOURCE}/cartpole/scripted-v0 ./cartpole",
        f"a {EXAMPLE_SOURCE.title} dataset, wherever it is stored, to TED",
    ),
    Example(f"rbtool convert ./{SOURCE}/pendulum/random-v0 ./few --episodes 0:2,4", "only some of its episodes"),
    Example("rbtool convert ./kitchen.hdf5 ./kitchen --horizon 280", "a D4RL file that does not mark time limits"),
    Example(
        "rbtool convert ./log.csv ./log --from table --map 'observation=obs_*' --map action=force,reward=r --ends done",
        "a table (CSV, HDF5, npz, npy, Parquet): rbtool inspect ./log.csv proposes the options",
    ),
    Example(
        f"rbtool convert ./{SOURCE}/pendulum/random-v0 ./swing --num-workers 2 --resume",
        "in two processes; after a crash, only what is not finished yet",
    ),
    Example("rbtool convert ./cartpole ./small --layout packed", "the same in less room, and faster to draw from"),
    Example(
        f"rbtool convert ./{SOURCE}/tuple/trunc-v0 ./tuple --dry-run --json",
        "what would be written, as JSON",
    ),
)


def convert(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The dataset to read; its format is detected.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="The folder to write.")],
    *,
    out: Output,
    episodes: Episodes = None,
    layout: FormatLayout = None,
    compress: Compress = None,
    final_step: FinalStep = FinalStepName.AUTO,
    root: Root = None,
    skip_bad: SkipBad = False,
    force: Force = False,
    dry_run: DryRun = False,
    num_workers: NumWorkers = 0,
    engine: Annotated[
        EngineName,
        typer.Option("--engine", help="Where those processes are: here, or on a Ray cluster that shares the folders."),
    ] = EngineName.LOCAL,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue what those processes left when they were interrupted.")
    ] = False,
    source_format: FromFormat = None,
    raw: RawOptions,
) -> None:
    """Turn a dataset on this machine into TED.

    Reads datasets of other libraries, which rbtool list --formats names; and datasets in TED and checkpoints, to put
    them into another layout. DEST appears when it is complete, or not at all.
    """
    from ..core.verbs.convert import convert as run

    apart = stdout_to_stderr() if engine is EngineName.RAY else contextlib.nullcontext()  # Ray prints about its workers
    with apart, out.progress() as progress:
        result = run(
            path, dest, episodes=episodes, layout=layout and layout.value, compress=compress or (), skip_bad=skip_bad,
            root=root, force=force, dry_run=dry_run, final_step=final_step.value, format=source_format,
            num_workers=num_workers, engine=engine.value, resume=resume, progress=progress, **raw,
        )  # fmt: skip
    show_published(out, result, dest)


EXPORT_EXAMPLES = (
    Example(
        f"rbtool export ./cartpole ./cartpole-{SOURCE} --to {SOURCE}",
        f"a folder that {EXAMPLE_SOURCE.title} opens",
    ),
    Example("rbtool export ./cartpole ./cartpole.npz --episodes 0:10", "some episodes for NumPy"),
    Example(f"rbtool export {STORED} ./steps.parquet", "a table of the steps, for pandas and its like"),
    Example("rbtool export ./cartpole ./table --to parquet", "steps and episodes, for datasets.load_dataset"),
    Example("rbtool export ./cartpole ./lerobot --to lerobot --fps 50", "for LeRobot, at 50 steps a second"),
    Example("rbtool export ./cartpole ./plain.h5 --dry-run --json", "what would be written, as JSON"),
)

_FORMATS = {one.name: one for one in declared() if one.sink is not None}
_SUFFIXES = ", ".join(suffix for one in _FORMATS.values() for suffix in one.suffixes)
_TO = "; ".join(f"{name}: {one.written}" if one.written else name for name, one in _FORMATS.items())

Format = enum.StrEnum("Format", {name.upper(): name for name in _FORMATS})  # type: ignore[misc]  # from declarations


def export(
    dataset: Dataset,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="The file (h5, npz, parquet) or folder to write.")],
    *,
    out: Output,
    to: Annotated[
        Format | None, typer.Option("--to", help=f"{_TO}. Default: by the suffix of DEST, {_SUFFIXES}.")
    ] = None,
    episodes: Episodes = None,
    root: Root = None,
    fps: Annotated[
        float | None,
        typer.Option("--fps", metavar="N", help="Steps a second, for lerobot. Default: as the source states it."),
    ] = None,
    skip_bad: SkipBad = False,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Write a dataset in a format of other tools.

    Values and element types are kept; what a format cannot store is listed. DEST appears when it is complete, or not
    at all.
    """
    from ..core.verbs.export import export as run

    with out.progress() as progress:
        result = run(
            dataset,
            dest,
            to=to and to.value,
            episodes=episodes,
            skip_bad=skip_bad,
            root=root,
            force=force,
            dry_run=dry_run,
            fps=fps,
            progress=progress,
        )
    form = _FORMATS[result.layout]
    inside, code = form.opened
    opened = dest if dest.lower().endswith(form.suffixes) else dest + inside
    show_published(out, result, dest, f"python -c {shlex.quote(code.format(repr(opened)))}")
