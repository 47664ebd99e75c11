"""TorchRL's layouts of whole episodes, flat, nested and H5: reads its files, and writes files that it can read."""
