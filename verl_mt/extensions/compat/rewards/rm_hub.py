r"""`rm_hub`: the rewards that slime's `--rm-type` names, as one reward with the type in `reward.kwargs`.

    reward.path=rm_hub reward.kwargs.rm_type=deepscaler

A row's own `metadata.rm_type` comes first. Each looks at `sample.response`, which holds everything after the prompt,
and at `sample.label`:

- `math`: the last `\boxed{...}` is the label (1 or 0); `deepscaler`: the same behind `</think>` (or `###Response`), and
  0 where there is none;
- `dapo`: what stands behind the last `Answer:` in the last 300 characters is the label, a whole number (1 or -1);
- `f1`: the overlap of words with the label, as HotpotQA counts it (0 to 1);
- `gpqa`: the letter that is chosen, or the text of the right choice (1 or 0);
- `random`: 0 or 1; `remote_rm`: what the server at `url` answers to prompt, response and label;
- `boxed_...`: any of them, shown the last `\boxed{...}` instead of the response.
"""

from __future__ import annotations

import random
import re
import string
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.rewards.math_grading import boxed, same_answer
from verl_mt.extensions.compat.slime_sample import Sample
from verl_mt.plugins import suggest

DAPO_TAIL = 300
"""Characters at the end in which an answer is looked for."""
_TRIES = 10
_CHOICE = (
    re.compile(r"(?:answer|option|choice)\s*(?:is|:)?\s*([A-Z])", re.IGNORECASE),
    re.compile(r"([A-Z])\s*(?:is\s*(?:the)?\s*correct)", re.IGNORECASE),
    re.compile(r"final\s*(?:answer|option)\s*(?:is|:)?\s*([A-Z])", re.IGNORECASE),
)
_LETTER = re.compile(r"\b([A-Z])\b")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots", "<|im_end|>",
    "<|endoftext|>",
)  # fmt: skip


class RuleReward:
    """The reward; called as `reward(args, sample)` for each Sample.

    Args:
        rm_type: of the rows without a `metadata.rm_type`.
        url: of the server that `remote_rm` asks.
        reward_key: which number of a rule that gives several is the score.

    Raises:
        ConfigError: a type that is not known, or `remote_rm` without a url.
    """

    def __init__(self, rm_type: str | None = None, url: str | None = None, reward_key: str = "score"):
        self.rm_type = rm_type
        self.reward_key = reward_key
        self.url = url
        if rm_type is not None:
            self._rule(rm_type, "reward.kwargs.rm_type")

    def __call__(self, args: Any, sample: Sample) -> float | dict[str, Any]:
        metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
        name = str(metadata.get("rm_type") or self.rm_type or "").strip()
        response = str(sample.response or "")
        if name.startswith("boxed_"):
            response = boxed(response) or ""
        found = self._rule(name, "the row's metadata.rm_type")(response, sample)
        if not isinstance(found, dict) or self.reward_key == "score":
            return found
        if self.reward_key not in found:
            raise ConfigError(f"reward.kwargs.reward_key={self.reward_key}: {name} gives {', '.join(found)}")
        return {**found, "score": found[self.reward_key]}

    def _rule(self, name: str, where: str) -> Callable[[str, Sample], float | dict[str, Any]]:
        plain = name.removeprefix("boxed_")
        if plain == "remote_rm":
            if self.url is None:
                raise ConfigError(f"{where}={name} asks a server. Give its address in reward.kwargs.url")
            return self._ask
        if plain in _NOT_HERE:
            raise ConfigError(f"{where}={name}: {_NOT_HERE[plain]}")
        if plain not in RULES:
            raise ConfigError(
                f"{where}: got {name!r}{suggest(plain, RULES)}. Known: {', '.join(RULES)}, remote_rm, and boxed_... of "
                "each. For another rule name a custom function in reward.path"
            )
        return RULES[plain]

    def _ask(self, response: str, sample: Sample) -> float | dict[str, Any]:
        """What the server says. A busy or failing one is asked again; reward.timeout_s ends it all."""
        assert self.url is not None
        body = {"prompt": sample.prompt, "response": response, "label": sample.label}
        for attempt in range(_TRIES):
            try:
                answer = httpx.post(self.url, json=body, timeout=120)
                answer.raise_for_status()
                found: float | dict[str, Any] = answer.json()
                return found
            except httpx.HTTPError:
                if attempt + 1 == _TRIES:
                    raise
                time.sleep(min(2**attempt, 30) + random.random())
        raise AssertionError("the last attempt returns or raises")


def check_rm_type(name: str) -> None:
    """Raises:
    ConfigError: a type that a reward of this name would refuse.
    """
    RuleReward(name, url="")


def math(response: str, label: Any) -> float:
    """1 where the last box is the label, which may be boxed itself."""
    truth = str(label) if label else ""
    wanted = boxed(truth) if "\\boxed" in truth else truth
    given = boxed(response)
    return float(bool(truth) and wanted is not None and given is not None and same_answer(given, wanted))


def deepscaler(response: str, label: Any) -> float:
    """`math` of what stands behind the thoughts; without an end of them there is no answer."""
    if "</think>" in response:
        solution = response.rpartition("</think>")[2]
    elif "###Response" in response:
        solution = response.split("###Response")[1]
    else:
        return 0.0
    given, truth = boxed(solution), str(label)
    if given is None or label is None or truth == "":
        return 0.0
    wanted = boxed(truth) if "\\boxed" in truth or "\\fbox" in truth else truth
    return float(wanted is not None and same_answer(given, wanted))


def dapo(response: str, label: Any) -> dict[str, Any]:
    """`score` 1 or -1, and `acc`; DAPO's data has whole numbers only.

    Raises:
        ValueError: a label that is no number.
    """
    answer = dapo_answer(response)
    try:
        wanted = str(int(float(_final(str(label)))))
    except (ValueError, OverflowError):
        raise ValueError(f"rm_type dapo compares whole numbers. The row's label is {label!r}") from None
    right = answer == wanted
    return {"score": 1.0 if right else -1.0, "acc": float(right)}


def dapo_answer(response: str) -> str:
    """What stands behind the last `Answer:`, without units and dressing; "[INVALID]" where there is none."""
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", response[-DAPO_TAIL:])
    return _final(found[-1] if found else "[INVALID]")


def _final(text: str) -> str:
    """A final answer without units and dressing, by the rule of Minerva (Lewkowycz et al. 2022, appendix D)."""
    text = text.rpartition("=")[2]
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for word in _REMOVED:
        text = text.replace(word, "")
    text = re.sub(r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$", text)
    for macro in ("text", "textbf", "overline"):
        text = re.sub(rf"(\\{macro}\{{)(.*?)(\}})", r"\2", text)
    text = re.sub(r"(\\boxed\{)(.*)(\})", r"\2", text)
    text = re.sub(r"(frac)([^{])(.)", r"frac{\2}{\3}", text)
    text = re.sub(r"(sqrt)([^{])", r"sqrt{\2}", text).replace("$", "")
    return (text.replace(",", "") if text.replace(",", "").isdigit() else text).strip()


def f1(response: str, label: Any) -> float:
    """Overlap of words, articles and punctuation aside; yes, no and noanswer are right or wrong."""
    given, wanted = _words(response), _words(str(label))
    single = {"yes", "no", "noanswer"}
    if given != wanted and (" ".join(given) in single or " ".join(wanted) in single):
        return 0.0
    common = sum((Counter(given) & Counter(wanted)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(given), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> list[str]:
    bare = "".join(sign for sign in text.lower() if sign not in string.punctuation)
    return _ARTICLES.sub(" ", bare).split()


def gpqa(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    """1 where the right choice is named by its letter, or its text stands in the answer.

    `metadata` may hold `choices`, `valid_letters`, `correct_letter`, `correct_answer` and `answer_text`; the label is
    a letter, the number of a choice, or its text.
    """
    choices = metadata.get("choices")
    texts = [str(c) for c in (choices.values() if isinstance(choices, dict) else choices or ())]
    named = metadata.get("valid_letters") or string.ascii_uppercase[: len(texts) or 10]
    letters = [str(letter).upper() for letter in named]
    right = _right_letter(label, metadata, texts, letters)
    answer = response.rpartition("</think>")[2]
    chosen = _chosen(answer, letters)
    if chosen and right:
        return float(chosen == right)
    targets = [metadata.get("correct_answer"), metadata.get("answer_text")]
    if right in letters and letters.index(right) < len(texts):
        targets.append(texts[letters.index(right)])
    text = label.strip() if isinstance(label, str) else ""
    if text and not (len(text) == 1 and text.upper() in letters):
        targets.append(text)
    said = f" {_bare(answer)} "
    if any(target and _bare(str(target)) and f" {_bare(str(target))} " in said for target in targets):
        return 1.0
    return float(bool(chosen) and not right and bool(text) and chosen == text.upper())


def _right_letter(label: Any, metadata: Mapping[str, Any], texts: Sequence[str], letters: Sequence[str]) -> str:
    given = metadata.get("correct_letter")
    right = given.strip().upper() if isinstance(given, str) else ""
    if isinstance(label, int | float) and 0 <= int(label) < len(letters):
        return letters[int(label)]
    if not right and isinstance(label, str):
        text = label.strip()
        if len(text) == 1 and text.upper() in letters:
            return text.upper()
        same = [letter for letter, choice in zip(letters, texts) if text and _bare(choice) == _bare(text)]
        return same[0] if same else ""
    return right


def _chosen(answer: str, letters: Sequence[str]) -> str:
    for pattern in _CHOICE:
        found = pattern.search(answer)
        if found and found[1].upper() in letters:
            return found[1].upper()
    return next((letter for letter in reversed(_LETTER.findall(answer)) if letter in letters), "")


def _bare(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


RULES: dict[str, Callable[[str, Sample], float | dict[str, Any]]] = {
    "math": lambda response, sample: math(response, sample.label),
    "deepscaler": lambda response, sample: deepscaler(response, sample.label),
    "dapo": lambda response, sample: dapo(response, sample.label),
    "f1": lambda response, sample: f1(response, sample.label),
    "gpqa": lambda response, sample: gpqa(response, sample.label, sample.metadata or {}),
    "random": lambda response, sample: float(random.randint(0, 1)),
}
"""Type -> its rule."""
_NOT_HERE = {
    "ifbench": "IFBench's checks of instructions are a separate package; call it from a function in reward.path",
}
