"""The few hot loops, compiled by numba where it is installed, each with a plain twin that does the same without."""

from .records import CompiledRecords, PlainRecords, RecordColumn, RecordPlaces, fastest_records
from .rows import CompiledRows, PlainRows, fastest_rows

__all__ = [
    "CompiledRecords",
    "CompiledRows",
    "PlainRecords",
    "PlainRows",
    "RecordColumn",
    "RecordPlaces",
    "fastest_records",
    "fastest_rows",
]
