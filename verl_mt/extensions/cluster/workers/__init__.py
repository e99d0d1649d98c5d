"""Ranks on Ray."""
