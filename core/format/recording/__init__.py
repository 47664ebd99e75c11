"""Recordings: packed datasets to which episodes are appended, with a log and repair."""
