"""Layout `ted`: one memory-mapped file per field."""
