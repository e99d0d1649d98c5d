"""Asynchronous training: steps ahead of the update, over-sampling, staleness metrics."""
