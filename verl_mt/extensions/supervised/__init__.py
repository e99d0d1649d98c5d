"""Supervised training on conversations."""
