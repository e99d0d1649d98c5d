"""Interactions that verl ships."""
