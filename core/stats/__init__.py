"""Statistics of the values of a dataset: counts, moments, extremes and quantiles, in one pass over its rows."""

from .collect import FieldStats, collect_stats, described_fields
from .moments import Moments, mean_of
from .quantiles import QUANTILE_ERROR, QuantileSketch
from .store import StatsStore

__all__ = [
    "QUANTILE_ERROR",
    "FieldStats",
    "Moments",
    "QuantileSketch",
    "StatsStore",
    "collect_stats",
    "described_fields",
    "mean_of",
]
