"""The environment of `my_project`: one object per conversation. Its public methods are the model's tools."""

import random
import re

from verl_mt import Environment, ToolCallError


class Stall(Environment):
    """A customer asks for a sum. The model may use the calculator, and has two answers.

    Args:
        answers: how many answers the customer waits for. `config` in `config.yaml` sets it.
    """

    def __init__(self, answers: int = 2):
        self.answers = answers

    def reset(self, seed: int) -> str:
        """Start an episode. Returns the prompt."""
        rng = random.Random(seed)
        a, b = rng.randint(2, 60), rng.randint(2, 60)
        self.total, self.said, self.right = a + b, 0, False
        return f"Ada has {a} maps and gets {b} more. How many maps does Ada have?"

    def calculator(self, expression: str) -> str:
        """Evaluate arithmetic.

        Args:
            expression: What to compute
        """
        found = re.fullmatch(r"(\d{1,9})([+-])(\d{1,9})", expression.replace(" ", ""))
        if found is None:
            raise ToolCallError("write two numbers, such as 3+4")
        return str(int(found[1]) + int(found[2] + found[3]))

    def reply(self, text: str) -> str:
        """Answer a turn without a tool call."""
        said = re.findall(r"#### (\d{1,9})\b", text)
        self.said += 1
        self.right = bool(said) and int(said[-1]) == self.total
        self.done = self.right or self.said == self.answers
        return "Thank you." if self.right else "That is wrong. Try again."

    def score(self) -> float:
        """1 for a right first answer, and less for each further one."""
        return float(self.right) / self.said if self.said else 0.0
