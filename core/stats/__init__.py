"""Statistics of the values of a dataset: counts, moments, extremes and quantiles, in one pass over its rows."""
