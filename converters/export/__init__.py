"""Exports to plain file formats: HDF5, NumPy and Parquet; rbtool opens them like the datasets they were made from."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

_OPENED = {
    "h5": (
        "HDF5, one dataset a leaf", "h5:H5Exporter", "one dataset a leaf", (".h5", ".hdf5"), "",
        "import h5py; h5py.File({}).visititems(print)",
    ),
    "npz": (
        "npz, one array a leaf", "reader:NpzExporter", "NumPy", (".npz",), "",
        "import numpy; print(numpy.load({}).files)",
    ),
    "parquet": (
        "Parquet, a row a step", "parquet:ParquetExporter", "a row a step", (".parquet",), "/steps.parquet",
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
        title=title,
        found="a file or folder that rbtool export wrote",
        ends="as in the dataset that was exported",
        final="yes",
        suffixes=suffixes,
        opened=(inside, code),
    )
    for order, (name, (title, sink, written, suffixes, inside, code)) in enumerate(_OPENED.items(), start=90)
)
