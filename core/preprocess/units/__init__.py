"""User functions and the units of rows that one call takes."""
