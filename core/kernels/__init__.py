"""The few hot loops: compiled by numba if it is installed, each with an equivalent in NumPy or torch."""
