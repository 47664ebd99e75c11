"""Text for language models: tokenizers that give tensordicts, token caches, batches, KL controllers, rollouts."""
