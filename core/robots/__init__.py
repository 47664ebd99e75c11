"""Robot data in `preprocess`: action spaces, tasks, idle ends, rates and pictures; and actions for a robot."""
