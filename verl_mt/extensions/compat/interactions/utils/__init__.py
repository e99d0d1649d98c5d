"""Helpers under the names that files written for verl import."""
