"""Rewards of the toolbox."""
