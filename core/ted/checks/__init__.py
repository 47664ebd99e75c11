"""Rules that TED data must keep, each a small class that sees the rows chunk by chunk."""
