"""Generate functions for tests, each the shortest one that shows its case."""

from __future__ import annotations

import asyncio
import copy
import threading

from verl_mt.extensions.compat.rollout.custom_generate import (
    GenerateState,
    RowTools,
    batched_async_rm,
    call_tools,
    post,
)
from verl_mt.extensions.compat.slime_sample import Sample

SEEN: list[dict] = []
"""What the functions were given."""


def url(args) -> str:
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"


async def ask(args, sample, params, text, **payload):
    return await post(url(args), {"text": text, "sampling_params": params, "return_logprob": True, **payload})


def fill(args, sample, *pieces):
    """A Sample of one conversation: replies of the engine, and texts between them."""
    tokenizer = GenerateState(args).tokenizer
    prompt = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    ids, mask, log_probs, response = [], [], [], ""
    for piece in pieces:
        if isinstance(piece, str):
            new = tokenizer(piece, add_special_tokens=False)["input_ids"]
            mask, log_probs = mask + [0] * len(new), log_probs + [0.0] * len(new)
            response += piece
        else:
            items = piece["meta_info"]["output_token_logprobs"]
            new = [item[1] for item in items]
            mask, log_probs = mask + [1] * len(new), log_probs + [item[0] for item in items]
            response += piece["text"]
        ids += new
    sample.tokens, sample.response_length, sample.response = prompt + ids, len(ids), response
    sample.loss_mask, sample.rollout_log_probs = mask, log_probs
    sample.status = Sample.Status.COMPLETED
    return sample


async def once(args, sample, params):
    SEEN.append({"args": args, "sample": copy.deepcopy(sample), "params": dict(params)})
    return fill(args, sample, await ask(args, sample, params, sample.prompt))


async def with_evaluation(args, sample, params, evaluation=False):
    SEEN.append({"evaluation": evaluation})
    params["max_new_tokens"] -= 1  # as slime's own functions do; it must not reach the next sample
    SEEN[-1]["max_new_tokens"] = params["max_new_tokens"]
    return fill(args, sample, await ask(args, sample, params, sample.prompt))


async def two_turns(args, sample, params):
    """Settings in args: `between` is appended, `own` how the function tokenizes it."""
    first = await ask(args, sample, params, sample.prompt)
    between = args.between
    second = await ask(args, sample, params, sample.prompt + first["text"] + between)
    return fill(args, sample, first, *(getattr(args, "pieces", None) or [between]), second)


async def two_turns_trusted(args, sample, params):
    """The same, by an author who vouches for all that it appends."""
    return await two_turns(args, sample, params)


two_turns_trusted.trust_text = True  # type: ignore[attr-defined]


async def by_ids(args, sample, params):
    """The same with ids, in the template's own markup."""
    state = GenerateState(args)
    ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    first = await post(url(args), {"input_ids": ids, "sampling_params": params, "return_logprob": True})
    history = [{"role": "user", "content": "q"}, {"role": "assistant", "content": first["text"]}]
    ids = ids + first["output_ids"]
    delta = state.chat.delta_ids([{"role": "user", "content": args.between}], history=history, last_ids=ids).ids
    second = await post(url(args), {"input_ids": ids + delta, "sampling_params": params, "return_logprob": True})
    sample.tokens = ids + delta + second["output_ids"]
    sample.response_length = len(first["output_ids"]) + len(delta) + len(second["output_ids"])
    return sample


async def cuts_back(args, sample, params):
    """Keeps what the model wrote up to a closing tag, and goes on behind an observation."""
    first = await ask(args, sample, params, sample.prompt)
    text = first["text"]
    kept = text[: text.index("</search>") + len("</search>")]
    second = await ask(args, sample, params, sample.prompt + kept + args.between)
    first["meta_info"]["output_token_logprobs"] = first["meta_info"]["output_token_logprobs"][: len(kept)]
    first["text"] = kept
    return fill(args, sample, first, args.between, second)


async def continues(args, sample, params):
    """Goes on after a turn that was cut, without a word between."""
    params["max_new_tokens"] = 3
    first = await ask(args, sample, params, sample.prompt)
    params["max_new_tokens"] = 30
    second = await ask(args, sample, params, sample.prompt + first["text"])
    SEEN.append({"reasons": [r["meta_info"]["finish_reason"]["type"] for r in (first, second)]})
    return fill(args, sample, first, second)


async def spoiled(args, sample, params):
    """One turn, then what `args.spoil` does to the Sample."""
    sample = fill(args, sample, await ask(args, sample, params, sample.prompt))
    return SPOILS[args.spoil](sample)


def _set(**fields):
    def spoil(sample):
        for name, change in fields.items():
            setattr(sample, name, change(getattr(sample, name)))
        return sample

    return spoil


SPOILS = {
    "short mask": _set(loss_mask=lambda m: m[:-1]),
    "short log-probs": _set(rollout_log_probs=lambda p: p[:-2]),
    "long response": _set(
        response_length=lambda n: n + 500, loss_mask=lambda m: None, rollout_log_probs=lambda p: None
    ),
    "late response": _set(
        response_length=lambda n: n - 2, loss_mask=lambda m: m[2:], rollout_log_probs=lambda p: p[2:]
    ),
    "other token": _set(tokens=lambda t: [*t[:-2], t[-2] + 1, t[-1]]),
    "other prompt": _set(tokens=lambda t: [t[0], t[1] + 1, *t[2:]]),
    "other log-prob": _set(rollout_log_probs=lambda p: [p[0] - 0.5, *p[1:]]),
    "made up tail": _set(
        tokens=lambda t: [*t, t[-2]],
        response_length=lambda n: n + 1,
        loss_mask=lambda m: [*m, 1],
        rollout_log_probs=lambda p: [*p, 0.0],
    ),
    "no sample": lambda sample: "text",
    "nothing": lambda sample: [None, None],
    "twice": lambda sample: [sample, sample],
    "copied": lambda sample: [sample, copy.deepcopy(sample)],
    "teacher": _set(teacher_log_probs=lambda p: [0.0]),
    "reward": _set(reward=lambda r: float("nan")),
    # these are fine
    "no mask": _set(loss_mask=lambda m: None, rollout_log_probs=lambda p: None),
    "cleared": _set(loss_mask=lambda m: [0, *m[1:]]),
    "cut": _set(
        tokens=lambda t: t[:-2],
        response_length=lambda n: n - 2,
        loss_mask=lambda m: m[:-2],
        rollout_log_probs=lambda p: p[:-2],
    ),
    "removed": _set(remove_sample=lambda r: True),
    "pending": _set(status=lambda s: Sample.Status.PENDING),
    "truncated": _set(status=lambda s: Sample.Status.TRUNCATED),
    "aborted": _set(status=lambda s: Sample.Status.ABORTED, loss_mask=lambda m: m[:1]),
    "failed": _set(status=lambda s: Sample.Status.FAILED),
    "failed_short": _set(status=lambda s: Sample.Status.FAILED, loss_mask=lambda m: m[:1]),
    "scored": _set(reward=lambda r: {"score": 0.25, "style": 3.0}),
}


async def raises(args, sample, params):
    reply = await ask(args, sample, params, sample.prompt)
    if "bad" in sample.prompt:
        raise RuntimeError(f"lost my way after {len(reply['output_ids'])} tokens")
    return fill(args, sample, reply)


async def swallows(args, sample, params):
    """As slime's document handles errors: caught, logged, given up."""
    try:
        await raises(args, sample, params)
    except RuntimeError:
        sample.status = Sample.Status.ABORTED
    return sample


BEGUN, OVER = threading.Event(), threading.Event()
"""`blocks` sets the one, and waits for the other."""


async def blocks(args, sample, params):
    """Blocks inside async code, the usual mistake."""
    BEGUN.set()
    assert OVER.wait(60), "the engine's loop stands still"
    return fill(args, sample, await ask(args, sample, params, sample.prompt))


async def never_ends(args, sample, params):
    await asyncio.sleep(1e6)


async def asks_elsewhere(args, sample, params):
    SEEN.append({"reply": await post(args.service, {"queries": ["x"]}, max_retries=2)})
    return fill(args, sample, await ask(args, sample, params, sample.prompt))


async def posts(args, sample, params):
    """Posts `args.payload`, with the prompt for `PROMPT`."""
    payload = {k: sample.prompt if v == "PROMPT" else v for k, v in args.payload.items()}
    reply = await post(url(args), payload)
    SEEN.append(reply)
    return fill(args, sample, reply) if payload.get("return_logprob") else _without_numbers(args, sample, reply)


def _without_numbers(args, sample, reply):
    prompt = GenerateState(args).tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens = prompt + reply["output_ids"]
    sample.response_length = len(reply["output_ids"])
    return sample


async def not_generate(args, sample, params):
    return await post(url(args).replace("/generate", "/flush_cache"), {})


async def team(args, sample, params):
    """`args.roles` agents at once, each with the same prompt; a worker that fails gives None."""

    async def agent(number, role):
        if role == "fails":
            return None
        mine = copy.deepcopy(sample)
        mine.metadata["role"] = role
        return fill(args, mine, await ask(args, mine, params, mine.prompt))

    samples = await asyncio.gather(*(agent(k, role) for k, role in enumerate(args.roles)))
    scores = await batched_async_rm(args, [s for s in samples if s is not None])
    for one, score in zip([s for s in samples if s is not None], scores, strict=True):
        one.reward = score
    return list(samples)


class Agent:
    """State beside the function."""

    async def __call__(self, args, sample, params):
        return await once(args, sample, params)


agent = Agent()


def not_async(args, sample, params):
    return sample


async def too_few(args):
    return None


async def with_row_tools(args, sample, params):
    """slime's document: tools of the row describe themselves in the prompt, and others are refused."""
    tools = RowTools(sample.metadata)
    sample.prompt = f"You have access to:\n{tools.describe()}\n\n{sample.prompt}"
    first = await ask(args, sample, params, sample.prompt)
    name = first["text"].removesuffix("<|im_end|>")
    told = tools.refusal(name) or f"{name} says {tools[name]['parameters']['required']}"
    second = await ask(args, sample, params, sample.prompt + first["text"] + told)
    return fill(args, sample, first, told, second)


async def with_tools(args, sample, params):
    """The run's own tools."""
    state = GenerateState(args)
    ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    start, messages = len(ids), [{"role": "user", "content": "q"}]
    while True:
        reply = await post(url(args), {"input_ids": ids, "sampling_params": params})
        ids = ids + reply["output_ids"]
        message, answers = await call_tools(state.chat.turn_text(reply["output_ids"]))
        messages.append(message)
        SEEN.append({"message": message, "answers": answers})
        if not answers:
            break
        ids = ids + state.chat.delta_ids(answers, history=messages, tools=state.tools, last_ids=ids).ids
        messages += answers
    sample.tokens, sample.response_length = ids, len(ids) - start
    return sample


async def through_wait_for(args, sample, params):
    """Every request in a task of its own: what it learns about contexts is lost (Python 3.11's `wait_for`)."""
    first = await asyncio.wait_for(asyncio.create_task(ask(args, sample, params, sample.prompt)), 600)
    kept = first["text"][:3]
    second = await asyncio.wait_for(asyncio.create_task(ask(args, sample, params, sample.prompt + kept + " | ")), 600)
    first["meta_info"]["output_token_logprobs"] = first["meta_info"]["output_token_logprobs"][:3]
    first["text"] = kept
    return fill(args, sample, first, " | ", second)


async def walks(args, sample, params):
    """Turn after turn as `args.steps` say: how the request is sent, how much of the turn is kept, what is appended."""
    tokenizer = GenerateState(args).tokenizer
    ids, text = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"], sample.prompt
    start, mask, log_probs = len(ids), [], []
    for by_text, cut, observed in args.steps:
        payload = {"text": text} if by_text else {"input_ids": ids}
        reply = await post(url(args), payload | {"sampling_params": params, "return_logprob": True})
        items, said = reply["meta_info"]["output_token_logprobs"], reply["text"]
        if cut is not None and cut < len(items) - 1:
            items, said = items[:cut], said[:cut]
        new = tokenizer(observed, add_special_tokens=False)["input_ids"]
        ids, text = ids + [item[1] for item in items] + new, text + said + observed
        mask += [1] * len(items) + [0] * len(new)
        log_probs += [item[0] for item in items] + [0.0] * len(new)
    sample.tokens, sample.response_length, sample.response = ids, len(ids) - start, text[len(sample.prompt) :]
    sample.loss_mask, sample.rollout_log_probs = mask, log_probs
    return sample


async def own_prompt(args, sample, params):
    """`args.frame` around the prompt, or instead of it."""
    sample.prompt = args.frame.replace("PROMPT", sample.prompt)
    return fill(args, sample, await ask(args, sample, params, sample.prompt))


SPOIL: list = []
"""What `wrong_for_bad` does with the Sample of a conversation about `bad`."""
REWARD: list = []
"""What `reward_for_bad` says of it."""


async def wrong_for_bad(args, sample, params):
    bad = "bad" in sample.prompt
    sample = await once(args, sample, params)
    return SPOIL[0](sample) if bad else sample


def reward_for_bad(args, sample, **kwargs):
    return REWARD[0] if "bad" in sample.prompt else 1.0


def rewards_for_bad(args, samples, **kwargs):
    return [reward_for_bad(args, sample) for sample in samples]


PAYLOAD: list = []
"""What `asks_wrongly` sends to the engine in a conversation about `bad`."""


async def asks_wrongly(args, sample, params):
    if "bad" in sample.prompt:
        await post(url(args), PAYLOAD[0])
    return await once(args, sample, params)
