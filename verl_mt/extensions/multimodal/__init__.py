"""Models that see images."""
