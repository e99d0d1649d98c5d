"""The agent rollout driver: a program that talks to an OpenAI-compatible URL is the policy."""
