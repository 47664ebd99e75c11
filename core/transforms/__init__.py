"""What happens to a batch on its way out of a buffer, and to data on its way in."""

from .base import CallableTransform, Compose, InvertTransform, Transform, as_transform

__all__ = ["CallableTransform", "Compose", "InvertTransform", "Transform", "as_transform"]
