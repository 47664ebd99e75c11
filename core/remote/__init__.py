"""Fetching files over the network: resumed, retried, verified. Knows no format."""
