"""What the rollout tests share: a chat with fixed ids for the pinned layouts, and a builder of real contexts."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

from verl_mt.chat.sanity import SanityMode, SanityMonitor
from verl_mt.data.requests import SamplingParams
from verl_mt.data.trajectory import Trajectory
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
