"""Environments of verifiers 0.1, as its users write them, and the parts of a run for each."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset

from verl_mt.extensions.environments.verifiers import parts

DATA = Dataset.from_list([{"question": f"Say {k}.", "answer": str(k)} for k in range(1, 9)])


def says(completion, answer) -> float:
    return float(answer in str(completion[-1]["content"]))


class Nudge(vf.MultiTurnEnv):
    """Asks again until the answer is right."""

    async def setup_state(self, state):
        state["asked"] = 0

    async def env_response(self, messages, state, **kwargs):
        state["asked"] += 1
        return [vf.UserMessage(content=f"Again, {state['asked']}: <|im_end|>")]


def double(number: int) -> int:
    """Double a number.

    Args:
        number: which
    """
    return 2 * number


class Secret(vf.StatefulToolEnv):
    """Its tool takes an argument that the model does not see."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.add_tool(self.note, args_to_skip=["basket"])

    async def setup_state(self, state):
        state["basket"] = []

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "basket": state["basket"]}

    async def note(self, word: str, basket: list) -> str:
        """Note a word.

        Args:
            word: which
            basket: where
        """
        basket.append(word)
        return " ".join(basket)


def made(kind, **config):
    return kind(dataset=DATA, rubric=vf.Rubric(funcs=[says]), **config)


single_run, single_reward, single_rows = parts(made(vf.SingleTurnEnv))
multi_run, multi_reward, multi_rows = parts(made(Nudge, max_turns=3))
tool_run, tool_reward, tool_rows = parts(made(vf.ToolEnv, tools=[double], max_turns=3))
secret_run, secret_reward, secret_rows = parts(made(Secret, max_turns=3))
