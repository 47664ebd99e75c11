"""The version, where both the package and its parts can import it."""

__version__ = "0.1.0"
