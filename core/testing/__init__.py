"""Test suites for the contracts, such as `SamplerTests`, and data for tests, shared by rbtool and its plug-ins."""
