"""One problem, one conversation, every token: green was sampled and is trained, grey was given and is not.

    python examples/01_one_conversation.py [--checker] [--seed N]

`--checker` adds a simulated user that looks at the answer and may ask for another try.
"""

import argparse

from rich.console import Console

from verl_mt.chat.display import render_tokens
from verl_mt.config.compose import compose
from verl_mt.trainer.inference import Inference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checker", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    overrides = ["data.val_max_samples=1", f"data.val_seed={args.seed}", f"trainer.seed={args.seed}"]
    if args.checker:
        overrides.append("actor_rollout_ref.rollout.interaction_config_file=interaction_configs/checker.yaml")

    with Inference(compose(overrides)) as policy:
        (group,) = policy.roll_out(policy.prompts())
        trajectory = group.trajectories[0]
        record = trajectory.records[0]

        console = Console()
        console.rule("the tokens")
        console.print(render_tokens(policy.chat, record.token_ids, record.loss_mask))
        console.rule("the messages")
        for message in trajectory.messages:
            calls = [call["function"] for call in message.get("tool_calls", [])]
            console.print(f"[bold]{message['role']}[/]", message["content"], *calls, highlight=False)
        console.rule("the numbers")
        console.print(f"{len(record.token_ids)} tokens, {sum(record.loss_mask)} of them trained", highlight=False)
        console.print(f"stop reason {trajectory.stop_reason}, reward {trajectory.reward}", highlight=False)


if __name__ == "__main__":
    main()
