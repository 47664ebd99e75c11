"""The library under the verbs: the TED format, datasets on disk, and what is done with them."""

__version__ = "0.1.0"
