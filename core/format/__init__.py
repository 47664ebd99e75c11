"""A dataset on disk: manifest, episode table, streaming writer, readers, atomic publish. Needs numpy only."""

from .contracts import EpisodeBlock, Piece, SourceFacts, StepReader
from .converter import Ids, Reader, Sink, Source

__all__ = ["EpisodeBlock", "Ids", "Piece", "Reader", "Sink", "Source", "SourceFacts", "StepReader"]
