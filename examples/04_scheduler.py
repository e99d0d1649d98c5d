"""A scheduler of your own: it runs the model's calls, and gives a wrong answer one more try in a fresh conversation.

    python examples/04_scheduler.py [--train STEPS]

A wrong attempt is forgotten: the model reads the problem and a tip, not what it wrote before. What it wrote stays in a
record of its own, so that every sampled token is trained once, and the reward sees all records of a trajectory.
"""

import argparse

from rich.console import Console

from verl_mt.config.compose import compose
from verl_mt.rewards.math_answer import is_right
from verl_mt.rollout.scheduler import ORM, MultiTurnScheduler, multi_turns, orms
from verl_mt.trainer.build import build_trainer
from verl_mt.trainer.inference import Inference

TIP = "Your last answer was wrong. "


class SecondChance(MultiTurnScheduler):
    """Calls are answered by the tools of the YAML file; a wrong answer begins the conversation again, once."""

    async def step(self, infer_request, response_choice, current_turn):
        if response_choice.message.tool_calls:
            infer_request.messages += await self.infer_engine.run_tools()
        else:
            system, problem = infer_request.messages[:2]
            infer_request.messages = [system, {"role": "user", "content": TIP + problem["content"]}]
        return {"infer_request": infer_request, "rollout_infos": {"tips": self.tips(infer_request)}}

    def check_finished(self, infer_request, response_choice, current_turn):
        if super().check_finished(infer_request, response_choice, current_turn):
            return True
        if response_choice.message.tool_calls:
            return False
        answer = response_choice.message.content
        return self.tips(infer_request) > 0 or is_right(answer, infer_request.data_dict["solution"])

    @staticmethod
    def tips(infer_request):
        return sum(str(message["content"]).startswith(TIP) for message in infer_request.messages)


class BestWithoutTip(ORM):
    """1 for a right answer, half of that where it took a second record."""

    def __call__(self, completions, **kwargs):
        scores = []
        for name in kwargs["request_id"]:
            records = kwargs["trajectory_inputs"][name]
            last = records[-1]["messages"][-1]["content"]
            scores.append(is_right(last, records[-1]["solution"]) / len(records))
        return scores


# In a file of your own, named by `external_plugins=my_plugins.py`, these two lines stand at its end.
multi_turns["second_chance"] = SecondChance
orms["best_without_tip"] = BestWithoutTip

OVERRIDES = [
    "actor_rollout_ref.rollout.multi_turn.scheduler=second_chance",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=6",
    "reward.path=best_without_tip",
    "trainer.logger=[]",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--train", type=int, default=0, metavar="STEPS")
    args = parser.parse_args()
    if args.train:
        more = [f"trainer.total_training_steps={args.train}", "trainer.resume_mode=disable", "data.val_files=null"]
        build_trainer(compose([*OVERRIDES, *more, "trainer.experiment_name=second_chance"])).fit()
        return
    with Inference(compose([*OVERRIDES, "data.val_max_samples=12"])) as policy:
        for group in policy.roll_out(policy.prompts()):
            trajectory = group.trajectories[0]
            told = f"{len(trajectory.records)} record(s), {trajectory.num_turns} turns, reward {trajectory.reward}"
            Console().print(f"{told}: {trajectory.messages[-1]['content']}", highlight=False)


if __name__ == "__main__":
    main()
