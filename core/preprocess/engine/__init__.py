"""The engine: a dataset through a processor, task by task."""
