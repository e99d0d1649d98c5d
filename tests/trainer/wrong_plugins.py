"""Plug-ins that return something wrong in one trajectory of three."""

from __future__ import annotations

from typing import Any

from verl_mt.extensions.compat.rollout.custom_generate import GenerateState, Sample, post
from verl_mt.extensions.compat.rollout.scheduler import MultiTurnScheduler, RolloutOutput
from verl_mt.interactions.base import BaseInteraction


def is_bad(trajectory_id: str | None) -> bool:
    """By the number of the sample: `step.prompt.sample`."""
    return int(str(trajectory_id).rsplit(".", 1)[-1]) % 3 == 0


class WrongMessages(MultiTurnScheduler):
    async def run(self, infer_request, request_config=None, **kwargs):
        response = await self.infer_engine.infer_async(infer_request, request_config)
        messages: list[Any] = ["text"] if is_bad(infer_request.uuid) else list(infer_request.messages)
        messages.append({"role": "assistant", "content": response.choices[0].message.content})
        return RolloutOutput(response, messages)


class TwoTurns(MultiTurnScheduler):
    def __init__(self, max_turns: int | None = None):
        super().__init__(2)

    def wrong(self, result: dict[str, Any]) -> dict[str, Any]:
        return result

    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append({"role": "user", "content": "Again."})
        ids = list(response_choice.token_ids)
        result = {"infer_request": infer_request, "response_token_ids": ids, "response_loss_mask": [1] * len(ids)}
        return self.wrong(result) if is_bad(infer_request.uuid) else result


class WrongMask(TwoTurns):
    def wrong(self, result):
        return result | {"response_loss_mask": ["0"] * len(result["response_token_ids"])}


class WrongInfos(TwoTurns):
    def wrong(self, result):
        inside: list[Any] = []
        inside.append(inside)
        return result | {"rollout_infos": {"k": inside}}


class WrongCheck(TwoTurns):
    def check_finished(self, infer_request, response_choice, current_turn):
        return "False" if is_bad(infer_request.uuid) else current_turn == 2


async def _one_turn(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {"text": sample.prompt, "sampling_params": sampling_params, "return_logprob": True}
    reply = await post(url, payload)
    sample.response, sample.status = reply["text"], Sample.Status.COMPLETED
    ids = GenerateState(args).tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens = ids + reply["output_ids"]
    sample.response_length = len(reply["output_ids"])
    return sample


async def wrong_status(args, sample, sampling_params):
    sample = await _one_turn(args, sample, sampling_params)
    if is_bad(sample.session_id):
        sample.status = "done"
    return sample


async def wrong_tokens(args, sample, sampling_params):
    sample = await _one_turn(args, sample, sampling_params)
    if is_bad(sample.session_id):
        sample.tokens = None
    return sample


def reward_func(args, sample, **kwargs):
    return "good" if is_bad(sample.session_id) else float(len(sample.response) % 2)


class Wrong(BaseInteraction):
    """The `field` of its answer is wrong."""

    async def generate_response(self, instance_id, messages, **kwargs):
        answer = {"should_terminate": len(messages) > 3, "text": "Again.", "score": 0.5, "extra": {}}
        if is_bad(instance_id.split("/")[0]):
            answer |= {"should_terminate": {"should_terminate": "False"}, "text": {"text": 5}}[self.config["field"]]
        return tuple(answer.values())
