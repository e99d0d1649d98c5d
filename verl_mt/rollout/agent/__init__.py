"""The agent door: a program that talks to an OpenAI-compatible URL is the policy."""
