"""verl_mt: reinforcement learning of language-model agents over several turns."""

__version__ = "0.1.0"
