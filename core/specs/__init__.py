"""Specs: descriptions of the shape, element type, device and legal values of tensors and other data."""

from typing import Any

from .bridge import watch


def _own_names() -> dict[str, Any]:
    from . import base, bounded, categorical, composite, non_tensor

    return vars(base) | vars(bounded) | vars(categorical) | vars(composite) | vars(non_tensor)


watch(_own_names)
