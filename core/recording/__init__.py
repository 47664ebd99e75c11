"""Recording: episodes of gymnasium environments, and rollouts of TorchRL, are written as datasets."""
