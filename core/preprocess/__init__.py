"""`preprocess`: applies a function or a program of operations to a dataset, chunk by chunk."""
