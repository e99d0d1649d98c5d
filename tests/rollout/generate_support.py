"""What the tests of generate functions share: a tokenizer that merges, a runner around a function, scripts."""

from __future__ import annotations

import asyncio
import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from toys import CHATML
from transformers import PreTrainedTokenizerFast

from verl_mt.chat.sanity import SanityMode, SanityMonitor
from verl_mt.chat.template import ChatTemplate
from verl_mt.config.schema import Config
from verl_mt.data.dataset import DataRow
from verl_mt.data.requests import SamplingParams
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.extensions.compat.generate.args import ARGS, GenerateArgs, Runtime
from verl_mt.extensions.compat.rollout.custom_generate import CustomGenerateDriver
from verl_mt.rewards.base import load_reward
from verl_mt.rollout.context import Limits
from verl_mt.rollout.drivers import DriverParts
from verl_mt.rollout.prompts import Prompt
from verl_mt.rollout.runner import RolloutPlan, RolloutRunner
from verl_mt.rollout.session import SessionContext


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """A token per character, and `ll` and `ar` are one where a tokenizer may choose: a model may sample two."""
    specials = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate([*specials, *string.printable, "ll", "ar"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("l", "l"), ("a", "r")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    fast.chat_template = CHATML
    return fast


CHAT = ChatTemplate(merging_tokenizer())
EOS = CHAT.tokenizer.eos_token_id


def spelled(text: str) -> list[int]:
    """One id per character: what a tokenizer would never choose where it can merge."""
    return [CHAT.tokenizer.convert_tokens_to_ids(c) for c in text]


def turn(text: str, *, reason: str = "stop", log_prob: float = -0.5):
    """A scripted turn in ids that no tokenizer would choose, ended by the template's end of turn."""
    ids = [*spelled(text), EOS] if reason == "stop" else spelled(text)
    return ids, None, reason, [log_prob - 0.01 * k for k in range(len(ids))]


def rows(*questions: str, chat: ChatTemplate | None = None, **columns) -> list[Prompt]:
    """Prompts of rows with these questions; `columns` go into every row."""
    prompts, chat = [], chat or CHAT
    for index, question in enumerate(questions):
        messages = [{"role": "user", "content": question}]
        raw = {"prompt": question, **columns}
        row = DataRow(messages, "toy", columns.get("label"), {}, raw, index, "toy.jsonl", "toy")
        row.label, row.metadata = columns.get("label"), columns.get("metadata", {})
        prompts.append(Prompt(row, messages, [], chat.prompt_ids(messages)))
    return prompts


def runner_of(path, script, *, limits=None, reward=None, engine=None, config=None, **keys) -> RolloutRunner:
    """A runner whose conversations are driven by the function at `path`, over scripted turns."""
    config, chat = config or Config(), keys.pop("chat", CHAT)
    config.actor_rollout_ref.rollout.custom_generate_function_path = path
    scorer = load_reward(reward or f"{__name__}.one", timeout_s=600.0)
    args = GenerateArgs(config, Runtime(chat, scorer, None))
    scorer.bind(config, DriverParts(shared={ARGS: args}))
    return RolloutRunner(
        context=SessionContext(
            chat=chat,
            engine=engine or ScriptedEngine(script, decode=chat.decode),
            limits=limits or Limits(response_length=2000, max_model_len=4000),
            parser=None,
            sampling=SamplingParams(max_new_tokens=1),
            sanity=SanityMonitor(SanityMode.STRICT),
            deterministic=keys.pop("deterministic", False),
        ),
        reward=scorer,
        driver=CustomGenerateDriver(config, args),
        **keys,
    )


def one(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


def roll_out(runner: RolloutRunner, prompts, *, n=1, evaluation=False):
    """All groups, in the order of the prompts."""

    async def go():
        plan = RolloutPlan(prompts, n, "s1", evaluation=evaluation)
        return [group async for group in runner.run(plan)]

    return sorted(asyncio.run(go()), key=lambda g: g.prompt_id)


def only(groups):
    """The one trajectory of a rollout."""
    [group] = groups
    [trajectory] = group.trajectories
    return trajectory
