"""Records environments: what gymnasium environments return, and the rollouts of TorchRL, become datasets."""
