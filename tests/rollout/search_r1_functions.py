"""A search agent in slime's manner, written for its API: only the first import lines are ours."""

from __future__ import annotations

import re

from verl_mt.extensions.compat.rollout.custom_generate import GenerateState, post
from verl_mt.extensions.compat.slime_sample import Sample

SETTINGS = {"max_turns": 3, "return_logprob": True}
HINT = "\nNo action found. Use <search>words</search> or <answer>text</answer>.\n"
DOCUMENTS = {"capital": '"Paris"\nParis is all there is.'}


async def look_up(query: str) -> str:
    if query == "down":
        raise ConnectionError("no route to the index")
    title, _, text = DOCUMENTS.get(query, "None\n").partition("\n")
    return f"Doc 1(Title: {title}) {text}\n"


def action_of(text: str) -> tuple[str | None, str]:
    found = re.search(r"<(search|answer)>(.*?)</\1>", text, re.DOTALL)
    return (found.group(1), found.group(2).strip()) if found else (None, "")


async def generate(args, sample: Sample, sampling_params) -> Sample:
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt = sample.prompt
    prompt_ids = state.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    response, ids, mask = "", [], []
    log_probs = [] if SETTINGS["return_logprob"] else None

    def observe(text: str) -> None:
        nonlocal response, ids, mask
        observed = state.tokenizer(text, add_special_tokens=False)["input_ids"]
        response += text
        ids += observed
        mask += [0] * len(observed)
        if log_probs is not None:
            log_probs.extend([0.0] * len(observed))
            assert len(ids) == len(log_probs)

    for _ in range(SETTINGS["max_turns"]):
        payload = {"text": prompt + response, "sampling_params": sampling_params}
        if log_probs is not None:
            payload["return_logprob"] = True
        output = await post(url, payload)
        reason = output["meta_info"]["finish_reason"]["type"]
        if reason == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        text = output["text"]
        if log_probs is not None:
            sampled = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
            log_probs += [item[0] for item in output["meta_info"]["output_token_logprobs"]]
        else:
            sampled = state.tokenizer(text, add_special_tokens=False)["input_ids"]
        response += text
        ids += sampled
        mask += [1] * len(sampled)
        action, content = action_of(text)
        if action == "answer":
            break
        if action == "search":
            try:
                observe(f"\n\n<information>{await look_up(content)}</information>\n\n")
            except ConnectionError as error:
                observe(f"<error>Tool failed: {error}</error>")
        else:
            observe(HINT)
        if reason == "length":
            sample.status = Sample.Status.TRUNCATED
            break

    sample.tokens = prompt_ids + ids
    sample.response_length = len(ids)
    sample.response = response
    sample.loss_mask = mask
    sample.prompt = prompt
    if log_probs is not None:
        sample.rollout_log_probs = log_probs
    if sample.status != Sample.Status.TRUNCATED:
        sample.status = Sample.Status.COMPLETED if reason == "stop" else Sample.Status.ABORTED
    return sample


async def reward_func(args, sample: Sample, **kwargs) -> float:
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    answers = re.findall(r"<answer>(.*?)</answer>", sample.prompt + sample.response, re.DOTALL)
    return float(bool(answers) and answers[-1].strip() in sample.label["ground_truth"])
