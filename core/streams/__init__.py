"""Datasets in shards, for training without a download: which shards there are, and those that are on this disk."""
