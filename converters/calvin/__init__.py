"""CALVIN's folders of play recordings, with an npz file for each frame, and texts for spans of frames: read."""

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
        found="a folder with ep_start_end_ids.npy and one npz per frame, or training and validation folders of these",
        ends="the end of a recording, or with --episodes-by annotation of an annotated span; truncated",
        final="no",
    ),
)
