"""Text for training language models: tokens, token caches, conversations, chat templates, rollouts, KL controllers."""
