"""The sanity check of a long conversation holds no other conversation up, and changes no order."""

from __future__ import annotations

import asyncio
import threading

import pytest
from toys import toy_tokenizer

from verl_mt.chat.sanity import SanityMode, SanityMonitor
from verl_mt.chat.template import ChatTemplate
from verl_mt.data.requests import SamplingParams
from verl_mt.data.trajectory import StopReason, Trajectory
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.rollout.context import Limits
from verl_mt.rollout.session import RolloutSession, SessionContext


class Slow(ChatTemplate):
    """Rendering a whole conversation takes until `over` is set."""

    def __init__(self, tokenizer, **keys):
        super().__init__(tokenizer, **keys)
        self.threads, self.over = [], threading.Event()

    def full_ids(self, messages, tools=None, **keys):
        self.threads.append(threading.get_ident())
        assert self.over.wait(60), "the loop stands still"
        return super().full_ids(messages, tools, **keys)


@pytest.fixture(scope="module")
def tokenizer():
    return toy_tokenizer()


def ended(chat, *, deterministic, mode=SanityMode.STRICT) -> RolloutSession:
    """A conversation that only has to be checked."""
    ids = [*chat.encode_text("yes", neutral=False), chat.tokenizer.eos_token_id]
    context = SessionContext(
        chat=chat,
        engine=ScriptedEngine([(ids, None, "stop", [-0.5] * len(ids))]),
        limits=Limits(response_length=2000, max_model_len=4000),
        parser=None,
        sampling=SamplingParams(max_new_tokens=1),
        sanity=SanityMonitor(mode),
        deterministic=deterministic,
    )
    question = [{"role": "user", "content": "q"}]
    session = RolloutSession(context, Trajectory("t", "p", "p", "t"))
    session.start(chat.prompt_ids(question), question, [])
    asyncio.run(session.generate())
    session.end(StopReason.FINISHED)
    return session


@pytest.mark.slow
def test_other_conversations_go_on_while_one_is_checked(tokenizer):
    session = ended(Slow(tokenizer), deterministic=False)

    async def go() -> None:
        done = asyncio.ensure_future(session.finish())
        while not session.context.chat.threads:
            await asyncio.sleep(0.001)
        assert not done.done()
        session.context.chat.over.set()
        await done

    asyncio.run(go())
    assert session.context.chat.threads != [threading.get_ident()]
    assert session.context.sanity.metrics() == {"sanity/mismatch_rate": 0.0}


@pytest.mark.slow
def test_a_deterministic_run_checks_where_it_samples(tokenizer):
    session = ended(Slow(tokenizer), deterministic=True)
    session.context.chat.over.set()
    asyncio.run(session.finish())
    assert session.context.chat.threads == [threading.get_ident()]
    assert session.context.sanity.metrics() == {"sanity/mismatch_rate": 0.0}


def test_where_the_check_is_off_no_thread_is_asked(tokenizer):
    session = ended(Slow(tokenizer), deterministic=False, mode=SanityMode.OFF)
    before = threading.active_count()
    asyncio.run(session.finish())
    assert session.context.chat.threads == [] and threading.active_count() == before
