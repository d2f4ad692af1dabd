"""Talking to a model: `terminal` in a terminal or a script."""
