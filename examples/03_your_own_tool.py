"""A tool of your own in a few lines, shown to the model and called by it.

    python examples/03_your_own_tool.py

The shipped model has only ever seen a calculator, so this tool keeps that name and says out loud what it computes.
"""

import ast
import operator

from verl_mt.config.compose import compose
from verl_mt.errors import ToolCallError
from verl_mt.tools.function_tool import function_tool
from verl_mt.tools.toolset import ToolSet
from verl_mt.trainer.inference import Inference

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}


@function_tool
def calculator(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression: What to compute
    """
    result = evaluate(ast.parse(expression, mode="eval").body)
    print(f"   my tool was asked for {expression} and says {result}")
    return str(result)


def evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
    # The model's own mistake: it is told, and may try again.
    raise ToolCallError(f"cannot evaluate {ast.unparse(node)}: use whole numbers, + - * / and parentheses")


def main() -> None:
    # Nearly greedy: what this half-trained model thinks likeliest.
    config = compose(["data.val_max_samples=3", "actor_rollout_ref.rollout.temperature=0.01"])
    with Inference(config, tools=ToolSet([calculator])) as policy:
        for prompt in policy.prompts():
            print(prompt.messages[-1]["content"])
            ((trajectory,),) = (group.trajectories for group in policy.roll_out([prompt]))
            print(f"   {trajectory.messages[-1]['content']}   (reward {trajectory.reward})")


if __name__ == "__main__":
    main()
