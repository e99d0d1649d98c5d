"""Adapters of environment libraries, and `verl-mt env check`."""
