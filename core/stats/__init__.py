"""Statistics of the values of a dataset: counts, moments, extremes and quantiles, in one pass over its rows."""

from .collect import FieldStats, StatsStore, collect_stats, described_fields
from .moments import QUANTILE_ERROR, Moments, QuantileSketch, mean_of

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
