"""Specs: which shape, element type and values something may have."""

from .bridge import watch

watch()
