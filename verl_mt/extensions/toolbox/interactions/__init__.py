"""Interactions of the toolbox."""
