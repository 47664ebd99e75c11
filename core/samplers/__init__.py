"""Samplers: which rows of a storage a batch consists of."""
