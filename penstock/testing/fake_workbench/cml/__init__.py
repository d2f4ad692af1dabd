"""The module that a workbench puts into its engines' Python."""
