"""CALVIN's folders: npz files of single frames, recordings of play, and spans with texts, are read."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="calvin",
        package=__name__,
        order=4,
        reader="reader:CalvinReader",
        title="CALVIN",
        found="a folder with ep_start_end_ids.npy beside an npz a frame, or training and validation with them",
        ends="the recording, or with --episodes-by annotation the span that has a text; truncated",
        final="no",
    ),
)
