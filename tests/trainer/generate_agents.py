"""A generate function for whole runs: the model with its calculator, by text, as slime's documents write loops."""

from __future__ import annotations

from verl_mt.extensions.compat.rollout.custom_generate import GenerateState, Sample, call_tools, post


async def calculator_agent(args, sample: Sample, sampling_params) -> Sample:
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    text, messages, ids, mask = sample.prompt, [{"role": "user", "content": "q"}], [], []
    for _ in range(3):
        reply = await post(url, {"text": text, "sampling_params": sampling_params, "return_logprob": True})
        ids += reply["output_ids"]
        mask += [1] * len(reply["output_ids"])
        text += reply["text"]
        message, answers = await call_tools(state.chat.turn_text(reply["output_ids"]))
        if reply["meta_info"]["finish_reason"]["type"] != "stop" or not answers:
            break
        messages.append(message)
        delta = state.chat.delta_ids(answers, history=messages, tools=state.tools, last_ids=ids).ids
        text += state.chat.decode(delta)
        ids += delta
        mask += [0] * len(delta)
        messages += answers
    prompt = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens, sample.response, sample.response_length = prompt + ids, text[len(sample.prompt) :], len(ids)
    sample.loss_mask = mask
    return sample


calculator_agent.trust_text = True  # type: ignore[attr-defined]
