"""Test suites for the contracts, such as `SamplerTests`, and data for tests, used by rbtool and by plug-ins."""
