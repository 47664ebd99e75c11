"""Maps whose keys are rows of tensors, and the search trees of rollouts that are stored in such maps."""
