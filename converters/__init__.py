"""Foreign formats, a package for each family; none imports torch.

Each package lists its formats in `FORMATS`, which `rbtool.core.declarations` reads. Adding a source adds a package.
"""
