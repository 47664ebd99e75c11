"""Text for training language models: tokenizers, token caches, batches, KL controllers and rollouts."""
