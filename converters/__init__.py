"""Foreign formats, one package for each family; none of them imports torch.

Each package lists its formats in `FORMATS`, which `rbtool.core.declarations` reads. Adding a source adds a package.
"""
