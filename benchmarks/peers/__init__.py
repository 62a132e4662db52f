"""The engines of a side by side: one file for each, one table of them all. None is a dependency of the package."""
