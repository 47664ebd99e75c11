"""TorchRL's layouts of whole episodes, flat, nested and H5: its files are read, and files that it reads are written."""
