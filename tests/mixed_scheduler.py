"""A scheduler that does to a conversation everything that one can: for tests of engines."""

from __future__ import annotations

from verl_mt.extensions.compat.rollout.scheduler import MultiTurnScheduler


class Mixed(MultiTurnScheduler):
    """Turn 1 is cut back and gone on with, turn 2 answered, turn 3 gone on with as it is; then all is rewritten."""

    runs_inline = True

    def step(self, infer_request, response_choice, current_turn):
        messages = infer_request.messages
        if current_turn == 1:
            text = messages[-1]["content"]
            messages[-1]["content"] = text[: max(1, len(text) // 2)] + " 12 + "
        elif current_turn == 2:
            messages.append({"role": "user", "content": "Is that right?"})
        elif current_turn == 4:
            infer_request.messages = [messages[0], {"role": "user", "content": "What is 3 + 4?"}]
        return {"infer_request": infer_request}

    def check_finished(self, infer_request, response_choice, current_turn):
        return current_turn >= 6
