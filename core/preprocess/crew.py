"""Who runs the chunks: this process itself, or worker processes that are told paths and row numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias

from ..ted import Field
from .failures import ChunkFailed
from .imports import FreshModules
from .job import Finished, Job

if TYPE_CHECKING:
    from .runner import ChunkRunner

__all__ = ["Chunk", "Crew", "InProcess"]

Chunk: TypeAlias = tuple[int, int]
"""Steps `[start, stop)`."""


class Crew(ABC):
    """A context manager that runs chunks; a chunk that fails raises ChunkFailed, whose cause says how."""

    @abstractmethod
    def schema(self, chunk: Chunk) -> tuple[Field, ...]:
        """Run the first chunk and say which fields come out of it."""

    @abstractmethod
    def open(self, folder: Path, fields: Sequence[Field]) -> None:
        """Prepare everybody to write into the files in `folder`."""

    @abstractmethod
    def run(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, Finished]]:
        """Run and write all chunks; yield each as it is finished, in any order."""

    @abstractmethod
    def close(self) -> None:
        """Stop at once and wait until nobody writes any more; harmless when done twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class InProcess(Crew):
    """Runs chunks here, on one torch thread, in order."""

    def __init__(self, job: Job) -> None:
        import torch  # workers need it; the process that only leads them does not

        from .runner import ChunkRunner

        self._threads = torch.get_num_threads()
        self._modules = FreshModules(job.function.neighbours())
        self._runner: ChunkRunner | None = None
        torch.set_num_threads(1)
        try:
            self._runner = ChunkRunner(job)
        except BaseException:
            self.close()
            raise

    def schema(self, chunk: Chunk) -> tuple[Field, ...]:
        """Run the first chunk here."""
        assert self._runner is not None
        try:
            return self._runner.schema(*chunk)
        except Exception as error:
            raise ChunkFailed(*chunk) from error

    def open(self, folder: Path, fields: Sequence[Field]) -> None:
        """Open the files here."""
        assert self._runner is not None
        self._runner.open(folder, fields)

    def run(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, Finished]]:
        """Run the chunks one after the other."""
        assert self._runner is not None
        for chunk in chunks:
            try:
                finished = self._runner.run(*chunk)
            except Exception as error:
                raise ChunkFailed(*chunk) from error
            yield chunk, finished

    def close(self) -> None:
        """Close the files and put torch's thread count, the import path and the modules back."""
        import torch

        if self._runner is not None:
            self._runner.close()
        torch.set_num_threads(self._threads)
        self._modules.restore()
