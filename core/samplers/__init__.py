"""Which rows are chosen."""
