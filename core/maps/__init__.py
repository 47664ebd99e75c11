"""Maps whose keys are rows of tensors: hashes of rows, their numbers, and storages that are asked by them."""
