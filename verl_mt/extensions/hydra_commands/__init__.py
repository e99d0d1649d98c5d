"""Hydra's command line beyond one run: what it prints, its files in the run directory, and sweeps."""
