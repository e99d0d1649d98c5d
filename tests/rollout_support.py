"""What the rollout tests share: a chat with fixed ids for the pinned layouts, and a builder of real contexts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from verl_mt.chat.sanity import SanityMode, SanityMonitor
from verl_mt.data.media import MediaInput
from verl_mt.data.requests import GenerationOutput, SamplingParams, VersionSpan
from verl_mt.data.trajectory import Trajectory
from verl_mt.rollout import session as module
from verl_mt.rollout.context import Limits
from verl_mt.rollout.session import RolloutSession, SessionContext


@dataclass
class FixedChat:
    """A chat room whose deltas are given: the layouts of the reference are about ids, not about templates."""

    deltas: list[list[int]] = field(default_factory=list)
    prefilled_reasoning: bool = False
    placeholder_ids: frozenset[int] = frozenset()
    capabilities: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(reasoning_content="ignored"))

    def delta_ids(self, messages, *, history, tools=None, last_ids, add_generation_prompt=True):
        return SimpleNamespace(ids=self.deltas.pop(0), inserted_end=0)

    def turn_text(self, ids):
        return " ".join(map(str, ids))

    def full_ids(self, messages, tools=None, *, add_generation_prompt=False):
        raise AssertionError("the sanity check is off in these tests")


def fixed_session(engine, deltas=(), *, limits: Limits | None = None, prompt=(1, 2, 3)) -> RolloutSession:
    """A started session over fixed ids."""
    context = SessionContext(
        chat=FixedChat(list(deltas)),  # type: ignore[arg-type]
        engine=engine,
        limits=limits or Limits(response_length=100, max_model_len=200),
        parser=None,
        sampling=SamplingParams(max_new_tokens=1),
        sanity=SanityMonitor(SanityMode.OFF),
    )
    session = RolloutSession(context, Trajectory("t", "p", "p", "t"))
    session.start(list(prompt), [{"role": "user", "content": "q"}], [])
    return session


@dataclass
class Texts(FixedChat):
    """Texts are their characters' numbers; a system message `s` stands before each prompt."""

    def continuation_ids(self, text):
        return [ord(letter) for letter in text]

    def mixed_prompt_ids(self, trusted, plain, tools=None, num_foreign=0):
        self.mixed = (list(trusted), list(plain), tools)
        return [7, 7, 7]

    def media_inputs(self, messages, ids):
        return [MediaInput("image", k, 1, {}) for k, number in enumerate(ids) if number == 9]

    def decode(self, ids):
        return "".join(map(chr, ids))


class Engine:
    """Gives the outputs one after the other; each takes as long as it says."""

    version = 4

    def __init__(self, *outputs, clock=None, seconds=0.0):
        self.outputs, self.requests, self.clock, self.seconds = list(outputs), [], clock, seconds

    async def generate(self, request):
        self.requests.append(request)
        if self.clock is not None:
            self.clock.now_s += self.seconds
        return self.outputs.pop(0)


def output(ids=(10, 11), finish_reason="stop", **changed) -> GenerationOutput:
    spans = [VersionSpan(5, 1), VersionSpan(6, len(ids) - 1)]
    return GenerationOutput(list(ids), [-0.5] * len(ids), finish_reason, spans, **changed)


def with_texts(
    engine, *, deltas=(), messages=({"role": "user", "content": "q"},), tools=(), kind=RolloutSession, **changed
):
    """A started session of class `kind`; `changed` are fields of its context."""
    session = fixed_session(engine, [])
    chat = Texts(list(deltas))
    session = kind(replace(session.context, chat=chat, **changed), session.trajectory)
    session.start([1, 2, 3], list(messages), list(tools))
    return session


class Recorder:
    """What the session asks of the sanity check."""

    def __init__(self, monkeypatch):
        self.asked, self.seen = [], []
        monkeypatch.setattr(module, "check", lambda chat, **keys: self.asked.append(keys))
        monkeypatch.setattr(module, "combine", lambda findings: self.finding)
        self.finding = SimpleNamespace(to_row=lambda: {"cause": "x"})
