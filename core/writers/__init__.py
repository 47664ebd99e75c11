"""Where new rows go."""
