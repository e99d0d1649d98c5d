"""Search-R1's conversation as a generate function of slime's kind: tags in one assistant message, no tool calls.

The model thinks, writes `<search>query</search>`, reads what comes back between `<information>` tags, and closes with
`<answer>`. Named by `actor_rollout_ref.rollout.custom_generate_function_path` and `reward.path`; its settings are
`custom_generate_kwargs.search`, and a row may change some of them in `metadata.search`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_mt.plugins import listing, suggest
from verl_mt.rewards.exact_match import compute_score
from verl_mt.rollout.custom_generate import GenerateState, Sample, post
from verl_mt.tools.search_client import SearchClient, SearchError, SearchSettings, information_block

logger = logging.getLogger(__name__)

HINT = "\nThis is no valid action. Write <search>a query</search> or <answer>the answer</answer>.\n"
ROW_SETTINGS = ("max_turns", "topk", "search_backend", "search_url", "format_score")
"""What a row may change for itself: the others belong to the process."""

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True)
class SearchR1Settings:
    """`custom_generate_kwargs.search`.

    Raises:
        ValueError: a value that cannot be.
    """

    max_turns: int = 2
    """Turns of the model; in the last one nothing is searched any more."""
    topk: int = 3
    search_concurrency: int = 256
    search_backend: str = "local"
    """`local` or `google`."""
    search_url: str = SearchSettings.retrieval_service_url
    """The retrieval service of backend `local`."""
    return_logprob: bool = True
    """Take the log-probs along into the sample (training does not need them there: they are recorded anyway)."""
    format_score: float = 0.2
    """Score of a wrong answer that was given in its tags."""

    def __post_init__(self) -> None:
        if not isinstance(self.max_turns, int) or self.max_turns < 1:
            raise ValueError(f"search.max_turns must be a whole number from 1, got {self.max_turns!r}")
        if not isinstance(self.return_logprob, bool):
            raise ValueError(f"search.return_logprob must be True or False, got {self.return_logprob!r}")
        if not 0 <= self.format_score <= 1:
            raise ValueError(f"search.format_score must be between 0 and 1, got {self.format_score!r}")
        _ = self.client_settings

    @property
    def client_settings(self) -> SearchSettings:
        """What the search client takes."""
        return SearchSettings(
            backend=self.search_backend,
            retrieval_service_url=self.search_url,
            topk=self.topk,
            concurrency=self.search_concurrency,
        )

    def changed(self, given: Mapping[str, Any], known: tuple[str, ...], where: str) -> SearchR1Settings:
        """These settings with some changed.

        Raises:
            ValueError: a setting that is not among `known`, or a value that cannot be.
        """
        for key in given:
            if key not in known:
                raise ValueError(f"{where}: unknown setting {key!r}{suggest(key, known)}. Known: {listing(known)}")
        return dataclasses.replace(self, **given)


def settings_of(args: Any, sample: Sample) -> tuple[SearchR1Settings, SearchR1Settings]:
    """(those of the run, those of this row)."""
    names = tuple(field.name for field in dataclasses.fields(SearchR1Settings))
    run = SearchR1Settings().changed(vars(args).get("search") or {}, names, "custom_generate_kwargs.search")
    return run, run.changed(sample.metadata.get("search") or {}, ROW_SETTINGS, "metadata.search")


@functools.cache
def client_of(settings: SearchSettings) -> SearchClient:
    """One client per process and settings: its limit and its cache are shared by all conversations."""
    return SearchClient(settings)


def parse_action(text: str) -> tuple[str | None, str]:
    """The first complete action of a turn and its content; (None, "") without one."""
    found = _ACTION.search(text)
    return (found.group(1), found.group(2).strip()) if found else (None, "")


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One conversation; fills the sample."""
    run, mine = settings_of(args, sample)
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sampling_params = sampling_params | {"stop": [*(sampling_params.get("stop") or []), "</search>", "</answer>"]}
    transcript = _Transcript(state, sample, with_log_probs=mine.return_logprob)
    for turn in range(mine.max_turns):
        payload = {"text": transcript.text, "sampling_params": sampling_params, "return_logprob": mine.return_logprob}
        output = await post(url, payload)
        finish = output["meta_info"]["finish_reason"]["type"]
        if finish == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        transcript.sampled(output)
        action, content = parse_action(output["text"])
        logger.debug("turn %d: action=%s, content=%.50s", turn, action, content)
        last = turn + 1 == mine.max_turns
        if action == "answer" or finish == "length" or last:
            sample.status = Sample.Status.TRUNCATED if finish == "length" else Sample.Status.COMPLETED
            break
        transcript.observe(await _look_up(content, run, mine, sample) if action == "search" else HINT)
    return transcript.fill()


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> dict[str, float]:
    """Exact match of what the model itself wrote, and what became of its searches."""
    if not isinstance(sample, Sample):
        raise TypeError(f"expected a Sample, got {type(sample).__name__}")
    _, mine = settings_of(args, sample)
    searches = sample.metadata.get("searches", 0)
    return {
        "score": compute_score(sample.model_text, sample.label, format_score=mine.format_score),
        "searches": searches,
        "search_errors": sample.metadata.get("search_errors", 0),
        "cache_hit_rate": sample.metadata.get("cache_hits", 0) / max(1, searches),
    }


async def _look_up(query: str, run: SearchR1Settings, mine: SearchR1Settings, sample: Sample) -> str:
    """The observation of one search; a failure is text that the model reads."""
    counts = sample.metadata
    counts["searches"] = counts.get("searches", 0) + 1
    try:
        result = await client_of(run.client_settings).search(query, mine.client_settings)
    except SearchError as error:
        counts["search_errors"] = counts.get("search_errors", 0) + 1
        return f"<error>Tool failed: {error}</error>"
    counts["cache_hits"] = counts.get("cache_hits", 0) + result.hit
    return information_block(result.text)


class _Transcript:
    """Text, ids, mask and log-probs of one sample, of equal length by construction."""

    def __init__(self, state: GenerateState, sample: Sample, *, with_log_probs: bool):
        self._tokenize = lambda text: state.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not isinstance(sample.prompt, str):
            raise TypeError("this function needs a rendered prompt: leave data.apply_chat_template on")
        self._sample, self._prompt = sample, sample.prompt
        self._prompt_ids: list[int] = self._tokenize(self._prompt)
        self._response = ""
        self._ids: list[int] = []
        self._mask: list[int] = []
        self._log_probs: list[float] | None = [] if with_log_probs else None

    @property
    def text(self) -> str:
        """Prompt and response so far: what the engine is asked to go on from."""
        return self._prompt + self._response

    def sampled(self, output: dict[str, Any]) -> None:
        """A turn of the model: the engine's own ids, never a tokenizer's."""
        self._response += output["text"]
        self._ids += output["output_ids"]
        self._mask += [1] * len(output["output_ids"])
        if self._log_probs is not None:
            self._log_probs += [item[0] for item in output["meta_info"]["output_token_logprobs"]]

    def observe(self, text: str) -> None:
        """Text that the model reads and is not trained on."""
        ids = self._tokenize(text)
        self._response += text
        self._ids += ids
        self._mask += [0] * len(ids)
        if self._log_probs is not None:
            self._log_probs += [0.0] * len(ids)

    def fill(self) -> Sample:
        """Write it all into the sample."""
        sample = self._sample
        sample.tokens = self._prompt_ids + self._ids
        sample.response_length = len(self._ids)
        sample.response = self._response
        sample.loss_mask = self._mask
        sample.rollout_log_probs = self._log_probs
        return sample
