"""What slime's example files import beside the driver's own names, by way of `verl_mt.rollout.custom_generate`.

A name that belongs to a part of slime which is not offered is a class here too, so that a file loads whole; using it
says what there is instead.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoProcessor, AutoTokenizer

from verl_mt.errors import LedgerError, PluginError, value_text
from verl_mt.extensions.compat.generate.args import GenerateState
from verl_mt.extensions.compat.generate.driver import post
from verl_mt.extensions.compat.not_offered import not_offered
from verl_mt.extensions.compat.rewards.math_grading import boxed
from verl_mt.extensions.compat.rewards.rm_hub import dapo, dapo_answer, deepscaler, math
from verl_mt.extensions.compat.slime_sample import Sample

extract_answer = boxed
"""slime's name for what the last box holds."""
get_deepscaler_rule_based_reward = deepscaler
"""slime's name for `rm_type=deepscaler`."""
_BOX_TAIL = 100


async def generate_turn(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> dict[str, Any]:
    """Sample one turn behind `sample.tokens`, and append it to the Sample.

    Returns:
        The engine's reply, as `post` gives it.
    """
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {"input_ids": list(sample.tokens), "sampling_params": sampling_params, "return_logprob": True}
    reply: dict[str, Any] = await post(url, payload)
    items = reply["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[item[1] for item in items],
        log_probs=[item[0] for item in items],
        meta_info=reply["meta_info"],
        text=reply["text"],
    )
    return reply


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One answer to `sample.prompt`, without tools.

    Raises:
        LedgerError: the prompt is no text; render its messages first.
    """
    if not sample.tokens:
        if not isinstance(sample.prompt, str):
            raise LedgerError(
                f"generate: sample.prompt must be a text, got {value_text(sample.prompt, 100)}. Say "
                "--apply-chat-template, or render it first"
            )
        sample.tokens = GenerateState(args).tokenizer.encode(sample.prompt, add_special_tokens=False)
    await generate_turn(args, sample, sampling_params)
    return sample


def get_model_url(args: Any, model_name: str = "default", endpoint: str = "/generate") -> str:
    """Where the policy is asked.

    Raises:
        PluginError: another model; a run has one.
    """
    if model_name not in ("default", "actor"):
        raise PluginError(
            f"get_model_url: the run has one model, the policy, and no {model_name!r}. Another one is a server that "
            "the function posts to by its own URL"
        )
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"


def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """A tokenizer by its folder or name; `GenerateState(args).tokenizer` is the run's own."""
    return AutoTokenizer.from_pretrained(name_or_path, **kwargs)


def load_processor(name_or_path: str, **kwargs: Any) -> Any:
    """What turns text and images into a model's inputs; None for a model of text, which has a tokenizer only."""
    try:
        found = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError):
        return None
    return None if hasattr(found, "convert_ids_to_tokens") else found


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index: None = None
) -> dict[str, Any]:
    """`score` 1 or -1, `acc` and `pred`, as slime's module `math_dapo_utils` scores DAPO's whole numbers.

    Args:
        strict_box_verify: the last box of the last 100 characters is the answer, instead of what follows `Answer:`.
        pause_tokens_index: not offered.

    Raises:
        PluginError: `pause_tokens_index` is given.
        ValueError: a ground truth that is no number.
    """
    if pause_tokens_index is not None:
        raise PluginError("compute_score: pause_tokens_index is not offered. Leave it None")
    if strict_box_verify:
        pred = boxed(solution_str[-_BOX_TAIL:])
        right = pred == ground_truth
        return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}
    scores = dapo(solution_str, ground_truth)
    return {"score": scores["score"], "acc": bool(scores["acc"]), "pred": dapo_answer(solution_str)}


def grade_answer_verl(solution_str: str, ground_truth: str) -> bool:
    """Whether the last box is the truth, which may be boxed itself."""
    return bool(math(solution_str, ground_truth))


class SingletonMeta(type):
    """Metaclass of classes that have one object, made by the first call."""

    _objects: dict[type, Any] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in cls._objects:
            cls._objects[cls] = super().__call__(*args, **kwargs)
        return cls._objects[cls]


_ROLLOUT = (
    "a whole rollout cannot be replaced; write generate(args, sample, sampling_params) for one sample "
    "(--custom-generate-function-path), and the run makes the groups, scores them and validates"
)
_AGENT = (
    "an agent that speaks to an endpoint is actor_rollout_ref.rollout.agent_function_path (docs/your_own_agent.md): "
    "the run serves the endpoint and records the tokens"
)
_IMAGES = "a row's images go with its prompt; images that a function adds are not trained, so they are not offered"
_MASKS = "which tokens were sampled is recorded; leave sample.loss_mask None, or append_response_tokens(trainable=...)"
_ADVICE = {
    **dict.fromkeys(
        (
            "generate_rollout", "generate_rollout_async", "generate_and_rm", "generate_and_rm_group", "eval_rollout",
            "eval_rollout_single_dataset", "abort", "RolloutFnTrainOutput", "RolloutFnEvalOutput", "call_rollout_fn",
            "DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "Dataset", "run", "call_dynamic_filter",
            "DynamicFilterOutput", "MetricGatherer",
        ),
        _ROLLOUT,
    ),
    **dict.fromkeys(
        (
            "AnthropicAdapter", "OpenAIAdapter", "ResponsesAdapter", "CLAUDE_CODE", "CODEX", "E2BSandbox", "Sandbox",
            "TrajectoryManager", "run_app_in_thread", "FilteredAccessLogger",
        ),
        _AGENT,
    ),
    **dict.fromkeys(
        ("encode_image_for_rollout_engine", "build_processor_kwargs", "prepare_model_inputs", "process_vision_info"),
        _IMAGES,
    ),
    **dict.fromkeys(("compute_rollout_step", "compute_statistics"), "the run logs every step by itself"),
    **dict.fromkeys(("MultiTurnLossMaskGenerator", "get_response_lengths"), _MASKS),
}  # fmt: skip


def not_offered_name(name: str) -> Any:
    """A stand-in for a name of slime's that is not offered; None for names that nobody knows."""
    return not_offered("slime", name, _ADVICE[name]) if name in _ADVICE else None
