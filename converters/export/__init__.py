"""Exports to plain file formats: HDF5, NumPy and Parquet; they are read as the datasets that they were."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

_OPENED = {
    "h5": (
        "h5:H5Exporter", "one dataset a leaf", (".h5", ".hdf5"), "", "import h5py; h5py.File({}).visititems(print)"
    ),
    "npz": ("reader:NpzExporter", "NumPy", (".npz",), "", "import numpy; print(numpy.load({}).files)"),
    "parquet": (
        "parquet:ParquetExporter", "a row a step", (".parquet",), "/steps.parquet",
        "import pyarrow.parquet as pq; print(pq.read_table({}))",
    ),
}  # fmt: skip

FORMATS = tuple(
    FormatDeclaration(
        name=name,
        package=__name__,
        order=order,
        sink=sink,
        steps="reader:ExportedSteps",
        written=written,
        suffixes=suffixes,
        opened=(inside, code),
    )
    for order, (name, (sink, written, suffixes, inside, code)) in enumerate(_OPENED.items(), start=1)
)
