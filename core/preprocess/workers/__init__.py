"""Where tasks run: executors, their worker processes, and the runner inside each."""
