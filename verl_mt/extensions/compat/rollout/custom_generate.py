"""What a plug-in file of slime's kind imports: `async generate(args, sample, sampling_params)` and its helpers.

The function runs as it was written; only its imports change::

    from verl_mt.rollout.custom_generate import GenerateState, Sample, post
"""

from typing import Any

from verl_mt.extensions.compat.generate.args import GenerateArgs, GenerateState
from verl_mt.extensions.compat.generate.driver import (
    CustomGenerateDriver,
    async_rm,
    batched_async_rm,
    call_tools,
    get,
    load_function,
    post,
)
from verl_mt.extensions.compat.generate.row_tools import RowTools
from verl_mt.extensions.compat.generate.slime_names import (
    SingletonMeta,
    compute_score,
    extract_answer,
    generate,
    generate_turn,
    get_deepscaler_rule_based_reward,
    get_model_url,
    grade_answer_verl,
    load_processor,
    load_tokenizer,
    not_offered_name,
)
from verl_mt.extensions.compat.slime_sample import Sample


def __getattr__(name: str) -> Any:
    """A name of slime's that is not offered loads, and says so when it is used."""
    if (found := not_offered_name(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found


__all__ = [
    "CustomGenerateDriver",
    "GenerateArgs",
    "GenerateState",
    "RowTools",
    "Sample",
    "SingletonMeta",
    "async_rm",
    "batched_async_rm",
    "call_tools",
    "compute_score",
    "extract_answer",
    "generate",
    "generate_turn",
    "get",
    "get_deepscaler_rule_based_reward",
    "get_model_url",
    "grade_answer_verl",
    "load_function",
    "load_processor",
    "load_tokenizer",
    "post",
]
