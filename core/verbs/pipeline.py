"""`preprocess --show-pipeline`: what options ask for, as a file that asks for the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..preprocess.operations import pipeline_text, program_of
from .results import Result

__all__ = ["PipelineResult", "show_pipeline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult(Result):
    """Operations in their order: as JSON, and as the `text` of a pipeline file."""

    kind: ClassVar[str] = "pipeline"
    operations: tuple[Mapping[str, Any], ...]
    text: str


def show_pipeline(
    operations: Mapping[str, Any] | None = None,
    pipeline: str | os.PathLike[str] | None = None,
    replay: str | os.PathLike[str] | None = None,
) -> PipelineResult:
    """Say what `preprocess` would do with these arguments, without a dataset to do it to.

    UsageError for operations that make no sense on any dataset.
    """
    program = program_of(operations, pipeline, replay)
    return PipelineResult(operations=tuple(program.describe()), text=pipeline_text(program))
