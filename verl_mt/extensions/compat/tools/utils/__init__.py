"""Helpers under the names that tools written for verl import."""
