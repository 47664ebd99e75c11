"""The transformers library, which is the extra `text`."""

from __future__ import annotations

from typing import Any

from ..errors import RbtoolError


def require_transformers(user: str) -> Any:
    """Import transformers for `user`, which messages name; RbtoolError where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise RbtoolError(
            f"{user} needs transformers, which is not installed here ({error})", hint="pip install 'rbtool[text]'"
        ) from error
    return transformers
