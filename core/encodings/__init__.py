"""Checkpoints of steps in four forms: `ted`, and `flat`, `nested` and `h5`, which store each state once."""
