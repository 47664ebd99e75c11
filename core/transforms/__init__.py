"""Transforms: what happens to batches on their way out of a buffer, and to data on its way in."""
