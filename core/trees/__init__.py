"""Trees of what was tried from a state on: forests that collect rollouts, the trees made of them, their drawings."""
