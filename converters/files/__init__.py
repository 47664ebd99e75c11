"""Files of other libraries that several formats share: HDF5 groups, NumPy arrays, archives, images."""
