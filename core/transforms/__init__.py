"""What happens to a batch on its way out of a buffer, and to data on its way in."""
