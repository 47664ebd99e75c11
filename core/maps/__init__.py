"""Maps whose keys are rows of tensors: hashes of rows, numbers for hashes, and storages indexed by content."""
