"""Layout `packed`: the fields of a step in one record."""
