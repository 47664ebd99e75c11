"""`preprocess --show-pipeline`: what options ask for, as a file that asks for the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..preprocess.operations import filters_left_out, pipeline_text, program_of
from .results import Result

__all__ = ["PipelineResult", "show_pipeline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult(Result):
    """Operations in their order: as JSON, and as the `text` of a pipeline file.

    `notes` say what a replay leaves out.
    """

    kind: ClassVar[str] = "pipeline"
    operations: tuple[Mapping[str, Any], ...]
    text: str
    notes: tuple[str, ...] = ()


def show_pipeline(
    operations: Mapping[str, Any] | None = None,
    pipeline: str | os.PathLike[str] | None = None,
    replay: str | os.PathLike[str] | None = None,
    *,
    replay_filters: bool = False,
) -> PipelineResult:
    """Say what `preprocess` would do with these arguments, without a dataset to do it to.

    UsageError for operations that make no sense on any dataset.
    """
    program = program_of(operations, pipeline, replay, replay_filters=replay_filters)
    notes = filters_left_out(replay) if replay is not None and not replay_filters else ()
    return PipelineResult(operations=tuple(program.describe()), text=pipeline_text(program), notes=notes)
