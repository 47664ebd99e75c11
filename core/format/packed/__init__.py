"""Layout `packed`: the fields of a step in one record; datasets, and recordings that episodes are appended to."""
