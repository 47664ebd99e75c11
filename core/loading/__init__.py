"""Batches for a training loop: data sets and loaders of `torch.utils.data`, the same for any number of workers."""
