"""Readers of file types that several formats share: HDF5, NumPy arrays, Arrow, archives, pickles and images."""
