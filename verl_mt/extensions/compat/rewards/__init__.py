"""Rewards that verl, ms-swift and slime ship."""
