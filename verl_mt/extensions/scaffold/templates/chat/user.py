"""The user of `my_project`: says the next line of the row's script until the answer is right."""

import re

from verl_mt import BaseInteraction


class User(BaseInteraction):
    """Speaks when the model has ended its turn without calling a tool."""

    async def generate_response(self, instance_id, messages, *, answer, script, **kwargs):
        """Returns (over, text, score of this turn, further data)."""
        asked = sum(message["role"] == "user" for message in messages)
        said = re.findall(r"#### (\d{1,9})\b", messages[-1]["content"])
        if said and int(said[-1]) == answer:
            return True, "Thank you.", 1.0, {}
        if asked > len(script):
            return True, "Goodbye.", 0.0, {}
        return False, script[asked - 1], 0.0, {}
