"""What a plug-in file of slime's kind imports: `async generate(args, sample, sampling_params)` and its helpers.

The function runs as it was written; only its imports change::

    from verl_mt.rollout.custom_generate import GenerateState, Sample, post
"""

from verl_mt.data.slime_sample import Sample
from verl_mt.rollout.generate.args import GenerateArgs, GenerateState
from verl_mt.rollout.generate.door import (
    CustomGenerateDoor,
    async_rm,
    batched_async_rm,
    call_tools,
    get,
    load_function,
    post,
)
from verl_mt.rollout.generate.row_tools import RowTools

__all__ = [
    "CustomGenerateDoor",
    "GenerateArgs",
    "GenerateState",
    "RowTools",
    "Sample",
    "async_rm",
    "batched_async_rm",
    "call_tools",
    "get",
    "load_function",
    "post",
]
