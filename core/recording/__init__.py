"""Recording: writes episodes of gymnasium environments, and rollouts of TorchRL, as datasets."""
