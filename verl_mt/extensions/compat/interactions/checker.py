"""`CheckerInteraction`: the user of the default arithmetic task."""

from __future__ import annotations

from typing import Any

from verl_mt.extensions.compat.interactions.gsm8k_interaction import Gsm8kInteraction


class CheckerInteraction(Gsm8kInteraction):
    """Compares the `#### N` of the model's last turn with `extra_info.interaction_kwargs.ground_truth`.

    Right: the conversation is over, score 1. Wrong: asks for another try, score 0.

    Args:
        config: `retry_text` and `done_text`, what it says; both optional.

    Raises:
        ValueError: another key in the config.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        unknown = set(config) - {"name", "retry_text", "done_text"}
        if unknown:
            raise ValueError(f"unknown config keys {sorted(unknown)}. Known: retry_text, done_text")
        self.wrong_text = str(config.get("retry_text") or "That is wrong. Try again.")
        self.correct_text = str(config.get("done_text") or "Correct.")
