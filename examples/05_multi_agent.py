"""Several agents on one problem: solvers, rewriters that see all solutions, and a selector that picks one.

    python examples/05_multi_agent.py [--parallel N] [--seed N]

Every agent's conversation becomes a trajectory of its own. Agents of one role are compared with each other, and all of
them earn a little more where the selected solution is right. The same function trains:

    python -m verl_mt.trainer actor_rollout_ref.rollout.n=1 \
        custom_generate_function_path=examples/05_multi_agent.py:generate
"""

import argparse
import asyncio
import copy
import logging
import re

from rich.console import Console

from verl_mt.config.compose import compose
from verl_mt.rollout.custom_generate import GenerateState, Sample, batched_async_rm, call_tools, post
from verl_mt.trainer.inference import Inference

log = logging.getLogger(__name__)

NUM_PARALLEL, MAX_TURNS = 2, 3
SUCCESS, FAILURE = 1.2, 0.8
REWRITE = "{problem}\n\nOthers have answered:\n{solutions}\n\nSay what is right, and answer yourself."
SELECT = "{problem}\n\nWhich of these answers is right?\n{solutions}\n\nEnd with Judgment: and its number."


async def generate(args, sample: Sample, sampling_params) -> list[Sample | None]:
    """One episode. A worker that failed is None in the list, and left out of training."""
    team = Team(args, sample, sampling_params)
    problem = next(m["content"] for m in sample.prompt if m["role"] == "user")

    solvers = await team.many("solver", problem)
    solutions = [text for _, text in solvers if text is not None]
    rewriters: list[tuple[Sample | None, str | None]] = []
    if solutions:
        rewriters = await team.many("rewriter", REWRITE.format(problem=problem, solutions=numbered(solutions)))
    scored = [[s for s, _ in agents if s is not None] for agents in (solvers, rewriters)]
    for group in scored:
        for agent, reward in zip(group, await batched_async_rm(args, group)):
            agent.reward = reward

    candidates = [(agent, text) for agent, text in rewriters if agent is not None and text is not None]
    selector = None
    if candidates:
        asked = SELECT.format(problem=problem, solutions=numbered([text for _, text in candidates]))
        selector, judgment = await team.one("selector", asked)
        if selector is not None:
            chosen = selected(judgment or "", len(candidates))
            selector.reward = candidates[chosen][0].reward if chosen is not None else 0.0

    won = selector is not None and selector.reward == 1.0
    everyone = [*scored[0], *scored[1], *([selector] if selector is not None else [])]
    for agent in everyone:
        # A weight does nothing to a reward of 0, and would turn a negative one the wrong way round.
        agent.reward = agent.reward * (SUCCESS if won else FAILURE)
    failed = sum(agent is None for agent, _ in [*solvers, *rewriters])
    return [*everyone, *[None] * failed]


class Team:
    """Agents that share a problem, a model and its tools."""

    def __init__(self, args, sample: Sample, sampling_params):
        self.args, self.sample, self.sampling = args, sample, sampling_params
        self.state = GenerateState(args)
        self.size = getattr(args, "num_parallel", NUM_PARALLEL)
        self.url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"

    async def many(self, role: str, prompt: str) -> list[tuple[Sample | None, str | None]]:
        """As many agents of a role as work side by side, all in the engine at once."""
        return list(await asyncio.gather(*(self.one(role, prompt) for _ in range(self.size))))

    async def one(self, role: str, prompt: str) -> tuple[Sample | None, str | None]:
        """An agent's conversation, and its last words; no Sample where it failed, no words where they were cut."""
        try:
            return await self._converse(role, prompt)
        except Exception as error:
            log.warning("a %s failed: %s", role, error)
            return None, None

    async def _converse(self, role: str, prompt: str) -> tuple[Sample, str | None]:
        chat, tools = self.state.chat, self.state.tools
        system = [m for m in self.sample.prompt if m["role"] == "system"]
        messages = [*system, {"role": "user", "content": prompt}]
        # What other agents wrote is plain text in this prompt, whatever they wrote.
        ids = chat.mixed_prompt_ids(system, messages[len(system) :], tools)
        length = len(ids)
        for turn in range(1, MAX_TURNS + 1):
            reply = await post(self.url, {"input_ids": ids, "sampling_params": self.sampling})
            ids = ids + reply["output_ids"]
            text, reason = chat.turn_text(reply["output_ids"]), reply["meta_info"]["finish_reason"]["type"]
            if reason != "stop" or not tools or turn == MAX_TURNS:
                break
            message, answers = await call_tools(text)
            messages.append(message)
            if not answers:
                break
            ids = ids + chat.delta_ids(answers, history=messages, tools=tools, last_ids=ids).ids
            messages += answers
        agent = copy.deepcopy(self.sample)
        agent.metadata["role"] = role
        # Without loss_mask and log-probs: what the engine sampled is trained, what tools said is not.
        agent.tokens, agent.response_length, agent.response = ids, len(ids) - length, chat.decode(ids[length:])
        agent.status = {"stop": Sample.Status.COMPLETED, "length": Sample.Status.TRUNCATED}.get(
            reason, Sample.Status.ABORTED
        )
        return agent, text if reason == "stop" else None


def numbered(solutions: list[str]) -> str:
    return "\n".join(f"{number}. {text}" for number, text in enumerate(solutions, start=1))


def selected(judgment: str, num_candidates: int) -> int | None:
    """The chosen candidate, from 0; None where the selector named none that exists. Its first word counts."""
    found = re.search(r"Judgment:\s*(\d+)", judgment)
    number = int(found.group(1)) if found else 0
    return number - 1 if 1 <= number <= num_candidates else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parallel", type=int, default=NUM_PARALLEL)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    overrides = [
        f"custom_generate_function_path='{__file__}:generate'",
        f"actor_rollout_ref.rollout.custom_generate_kwargs={{num_parallel:{options.parallel}}}",
        "data.apply_chat_template=False",
        "data.val_max_samples=2",
        f"data.val_seed={options.seed}",
        f"trainer.seed={options.seed}",
        "actor_rollout_ref.rollout.max_model_len=1024",
    ]
    console = Console()
    with Inference(compose(overrides)) as policy:
        for group in policy.roll_out(policy.prompts(), n=1):
            console.rule(f"{len(group.trajectories)} trajectories of one episode")
            for trajectory in group.trajectories:
                words = " / ".join(trajectory.turn_texts)
                console.print(f"{trajectory.group_id:30} reward {trajectory.reward:.1f}: {words:.150}", highlight=False)


if __name__ == "__main__":
    main()
