"""Search trees from rollouts: forests that collect rollouts, the trees below a state, and drawings of trees."""
