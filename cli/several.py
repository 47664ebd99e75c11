"""Several datasets for one verb: patterns, one result after the other, and the highest exit code."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias

import typer

from ..core.errors import DatasetNotFoundError, RbtoolError, UsageError
from ..core.progress import counted
from .failures import report
from .help import EXAMPLE_SOURCE, SOURCE
from .output import Output
from .text import Line, Styled

_ABOUT = f"Paths, stored datasets like {SOURCE}:{EXAMPLE_SOURCE.example[0]}, or patterns like 'data/*'."
Datasets: TypeAlias = Annotated[list[str], typer.Argument(metavar="DATASET...", help=_ABOUT)]
SomeDatasets: TypeAlias = Annotated[list[str] | None, typer.Argument(metavar="DATASET...", help=_ABOUT)]
_WILD = frozenset("*?[")


def of_each(
    verb: str,
    datasets: Sequence[str],
    root: str | None,
    out: Output,
    run: Callable[[str, Output], int],
    *,
    named: bool = True,
    failed: Callable[[str, Exception], None] = lambda name, error: None,
) -> int:
    """Call `run` with each dataset and return the highest exit code; a failure is reported, and the rest still run.

    `failed` is called with the name and the error of each dataset that fails.

    For a single name that is not a pattern, the output is the same as from `run`. For several, an empty line and,
    with `named`, the name of the dataset come before each text; `--json` gives one document with the document or error
    of each dataset by name.
    """
    if len(datasets) == 1 and not _is_pattern(datasets[0]):
        try:
            return run(datasets[0], out)
        except Exception as error:
            failed(datasets[0], error)
            raise
    codes: dict[str, int] = {}
    documents: dict[str, Any] = {}
    shown = False
    for name in dict.fromkeys(one for word in datasets for one in _matches(word, root)):
        title: list[Line] = [[Styled(name, "bold")]] if named else []
        part = out.part([*([[]] if shown else []), *title], _keeper(documents, name))
        try:
            codes[name] = run(_existing(name), part)
        except Exception as error:
            failed(name, error)
            codes[name] = report(_with_name(error, name), part)
        shown = shown or part.shown
    if out.as_json:
        from ..core.results import DatasetsResult, entries_of

        out.document(entries_of(DatasetsResult(verb=verb, datasets=documents)))
    elif (not_zero := [name for name, code in codes.items() if code]) and len(codes) > 1:
        out.summary(f"{len(not_zero):,} of {counted(len(codes), 'dataset')} failed: {', '.join(not_zero)}")
    return max(codes.values())


def require_datasets(datasets: list[str] | None) -> list[str]:
    """Return the datasets; UsageError for none, where an option makes them optional."""
    if not datasets:
        raise UsageError("missing argument 'DATASET...'", hint="rbtool check --help")
    return datasets


def _keeper(documents: dict[str, Any], name: str) -> Callable[[dict[str, Any]], None]:
    def keep(document: dict[str, Any]) -> None:
        documents[name] = document

    return keep


def _is_pattern(word: str) -> bool:
    from ..core.format import fs

    return not _WILD.isdisjoint(word) and not os.path.lexists(fs.expanded(word))


def _matches(word: str, root: str | None) -> list[str]:
    """Return the paths that a pattern matches, or the stored datasets if it contains `:`; the word itself for none."""
    if not _is_pattern(word):
        return [word]
    from ..core.format import fs
    from ..core.format.locate import fits, known_root, stored_datasets, stored_name

    if ":" not in word:
        found = glob.glob(str(fs.expanded(word)), recursive=True)  # noqa: PTH207 - patterns may be absolute
        return sorted(found) or [word]
    folder = known_root(root)
    stored = [stored_name(path, folder) for path, _ in stored_datasets(folder)] if folder else []
    return sorted(name for name in stored if fits(name, word)) or [word]


def _existing(name: str) -> str:
    if _is_pattern(name):
        raise DatasetNotFoundError(f"{name} matches no dataset", hint="rbtool list shows those that are stored")
    return name


def _with_name(error: Exception, name: str) -> Exception:
    """Add the name of the dataset to an error that does not have it."""
    if isinstance(error, RbtoolError) and name not in error.message:
        error.message = f"{name}: {error.message}"
    return error
