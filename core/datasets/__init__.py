"""Buffers on datasets: what a training script opens."""
