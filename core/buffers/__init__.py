"""Buffers: a storage, a sampler, a writer and a transform, put together."""
