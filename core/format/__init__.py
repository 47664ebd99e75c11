"""A dataset on disk: manifest, episode table, streaming writer, readers, atomic publish. Needs numpy only."""

from .contracts import Piece, SourceFacts, StepReader
from .reader import Reader
from .sinks import Sink
from .sources import Ids, Source

__all__ = ["Ids", "Piece", "Reader", "Sink", "Source", "SourceFacts", "StepReader"]
