"""Zarr stores of Diffusion Policy, UMI and DP3: one array per key for all episodes, and an array of episode ends."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="zarr",
        package=__name__,
        order=20,
        reader="reader:ZarrReader",
        sink="export:ZarrExporter",
        title="Zarr of Diffusion Policy",
        written="Zarr with episode_ends",
        suffixes=(".zarr", ".zarr.zip"),
        opened=("", "import zarr; print(zarr.open({}, mode='r')['meta/episode_ends'][:])"),
        found="a Zarr store, folder or zip, with an array meta/episode_ends",
        layout="packed",
        ends="the rows in meta/episode_ends; truncated",
        final="no",
        extra="zarr",
        keeps_video=True,
    ),
)
