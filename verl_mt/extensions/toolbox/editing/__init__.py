"""Conversations that a driver edits: go on inside a message, cut it back, or show the model another history."""
