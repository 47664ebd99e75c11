"""A dataset on disk: manifest, episode table, streaming writer, readers, atomic publish. Needs numpy only."""

from .contracts import EpisodeBlock, Piece, SourceFacts, StepReader
from .reader import Reader
from .sinks import Sink
from .sources import Ids, Source

__all__ = ["EpisodeBlock", "Ids", "Piece", "Reader", "Sink", "Source", "SourceFacts", "StepReader"]
