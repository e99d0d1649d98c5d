"""Modules that files of ms-swift and slime import."""
