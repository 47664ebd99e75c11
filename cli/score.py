"""`rbtool score`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

from ..core.progress import counted
from ..core.verbs.options import ScoreOptions
from .help import Example
from .options import Dataset, OptionGroup, verb
from .output import Output
from .text import Cell, Line, Styled, Table, folded

if TYPE_CHECKING:
    from ..core.verbs.score import EpisodeScores

EXAMPLES = (
    Example("rbtool score ./cartpole", "the episodes with the lowest scores"),
    Example(
        "rbtool score ./cartpole --dest ./scored"
        " && rbtool preprocess ./scored --filter 'score.quality > 0.5' --dest ./good",
        "a copy with the scores, and its better episodes",
    ),
    Example(
        "rbtool score ./cartpole --dest ./rated"
        " && rbtool sample ./rated --sampler prioritized --priority score.quality",
        "draw good episodes more often",
    ),
    Example("rbtool score ./cartpole --json", "all scores of all episodes, as JSON"),
)

_SHOWN = 10


@verb("score", EXAMPLES)
def score(
    dataset: Dataset,
    *,
    out: Output,
    options: Annotated[dict[str, Any], OptionGroup.of(ScoreOptions)],
) -> None:
    """Score each episode from 0 to 1, compared with the others.

    Quality is the product of four scores: smooth motion, motion without stalls, agreement with the actions of other
    episodes in the same states, and being typical. Coverage and novelty tell how much an episode adds. All of this
    assumes that most episodes are good.
    """
    from ..core.verbs.score import score as run

    result = out.run(run, dataset, **options)
    lowest = sorted(result.scores, key=lambda one: 1.0 if one.quality is None else one.quality)
    for note in result.notes:
        out.summary(f"note: {note}")
    dest = options.get("dest")
    if dest is not None:
        state = "nothing was written; this would be " if result.dry_run else ""
        state = "already there: " if result.already_there else state
        counts = f"{counted(result.steps, 'step')} in {counted(result.episodes, 'episode')}"
        out.summary(Styled(state, "yellow"), f"{dest}: {counts}, with scores")
    out.show(
        result,
        [dest] if dest is not None else [str(one.episode) for one in lowest],
        lambda _, width: score_lines(lowest, width),
    )
    if dest is not None and not result.dry_run:
        out.suggest(f"rbtool preprocess {shlex.quote(dest)} --filter 'score.quality > 0.5' --dest DEST")


def score_lines(lowest: list[EpisodeScores], width: int | None) -> list[Line]:
    """Return the episodes with the lowest quality, and the medians of all."""
    from ..core.verbs.score import NAMES

    rows: list[Line] = [[Styled(text, "dim") for text in ("episode", "steps", *NAMES)]]
    rows += [
        [f"{one.episode:,}", f"{one.length:,}", *(_cell(getattr(one, name), name) for name in NAMES)]
        for one in lowest[:_SHOWN]
    ]
    lengths = sorted(one.length for one in lowest)
    medians = [_median([getattr(one, name) for one in lowest]) for name in NAMES]
    rows.append([Styled("median", "dim"), f"{lengths[len(lengths) // 2]:,}", *map(_cell, medians)])
    lines: list[Line] = list(Table(rows, right=frozenset(range(2 + len(NAMES)))).lines(width))
    if len(lowest) > _SHOWN:
        text = f"the lowest {_SHOWN} of {len(lowest):,} by quality; --json has all"
        lines += folded([Styled(text, "dim")], width, 2)
    return lines


def _median(values: list[float | None]) -> float | None:
    known = sorted(value for value in values if value is not None)
    return known[len(known) // 2] if known else None


def _cell(value: float | None, name: str = "") -> Cell:
    """Return a score as text, yellow if it is below 0.5 and a low value is bad."""
    if value is None:
        return "-"
    odd = value < 0.5 and name not in ("", "coverage", "novelty")
    return Styled(f"{value:.2f}", "yellow") if odd else f"{value:.2f}"
