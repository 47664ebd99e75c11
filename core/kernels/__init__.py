"""The few hot loops, compiled by numba where it is installed, each with a plain twin that does the same without."""
