"""Writers: at which rows of a storage new elements are written."""
