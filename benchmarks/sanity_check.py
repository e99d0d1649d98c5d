"""What the tokenization sanity check adds to a long conversation, and how that grows with the number of turns.

    python benchmarks/sanity_check.py [--turns 100 200 400 800] [--repeats 3]

One conversation with a tool call per turn, written in another layout than the template's, so that every turn is a
mismatch (`reserialized_arguments`): the worst case of the check. Prompt, deltas, parsing and ledger are the rollout's
own; the engine is a script and costs nothing. CPU seconds of this process; the smallest of the repetitions counts.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from provenance import add_out, write_rows
from rich.console import Console
from rich.table import Table

from verl_mt.chat import ChatTemplate, load_chat
from verl_mt.chat.parsers import get_parser
from verl_mt.chat.sanity import SanityMode, SanityMonitor
from verl_mt.config_paths import TINY_MODEL
from verl_mt.data.requests import SamplingParams
from verl_mt.data.trajectory import StopReason, Trajectory
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.rollout.context import Limits
from verl_mt.rollout.session import RolloutSession, SessionContext

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up in the catalogue.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
TWO = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "t"}]
RESULT_WORDS = 10
MODES = (SanityMode.STRICT, SanityMode.IGNORE_STRIPPABLE, SanityMode.OFF)


def script_of(chat: ChatTemplate, num_turns: int) -> list[tuple[list[int], None, str, list[float]]]:
    """Turns with a call whose JSON has no spaces, where the template writes some; the last turn answers."""
    end = min(chat.stop_token_ids)
    call = json.dumps({"name": "look_up", "arguments": {"word": "w{}"}}, separators=(",", ":"))
    texts = [f"<tool_call>\n{call.replace('w{}', f'w{k}')}\n</tool_call>" for k in range(num_turns - 1)]
    turns = [[*chat.encode_text(text, neutral=False), end] for text in [*texts, "That is all."]]
    return [(ids, None, "stop", [-0.5] * len(ids)) for ids in turns]


def converse(num_turns: int, mode: SanityMode) -> tuple[float, int]:
    """CPU seconds of one conversation, the check included; and how many tokens were recorded."""
    chat = load_chat(TINY_MODEL)  # another one each time: it remembers what it has rendered and encoded
    chat.delta_ids(TWO[1:], history=TWO[:1], tools=[TOOL], last_ids=[min(chat.stop_token_ids)])  # probes the template
    engine = ScriptedEngine(script_of(chat, num_turns))
    context = SessionContext(
        chat=chat,
        engine=engine,
        limits=Limits(response_length=10**7, max_model_len=10**7),
        parser=get_parser("hermes"),
        sampling=SamplingParams(max_new_tokens=1),
        sanity=SanityMonitor(mode),
    )
    prompt = [{"role": "user", "content": "Look these words up."}]
    session = RolloutSession(context, Trajectory("t", "p", "p", "t"))

    async def go() -> None:
        for k in range(num_turns):
            turn = await session.generate()
            assert turn is not None
            if turn.parsed.actions:
                content = " ".join(f"{k}.{i} shelf {i + k}" for i in range(RESULT_WORDS))
                session.extend([{"role": "tool", "content": content, "tool_call_id": turn.parsed.actions[0].id}])
        session.end(StopReason.FINISHED)
        await session.finish()

    gc.collect()  # what earlier conversations left is not this one's cost
    begun = time.process_time()
    session.start(chat.prompt_ids(prompt, [TOOL]), prompt, [TOOL])
    asyncio.run(go())
    return time.process_time() - begun, len(session.trajectory.records[0].token_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[100, 200, 400, 800])
    parser.add_argument("--repeats", type=int, default=3)
    add_out(parser)
    args = parser.parse_args()
    for mode in MODES:
        converse(4, mode)  # imports
    table = Table("turns", "tokens", *(f"{mode}, CPU s" for mode in MODES), "strict / off", "ignore / off")
    ratios, rows = [], []
    for num_turns in args.turns:
        # In turn, not one mode after the other: what else the machine does then weighs on all of them alike.
        runs = [{mode: converse(num_turns, mode) for mode in MODES} for _ in range(args.repeats)]
        best = {mode: min(run[mode][0] for run in runs) for mode in MODES}
        num_tokens = runs[0][SanityMode.OFF][1]
        seconds_of = {str(mode): [run[mode][0] for run in runs] for mode in MODES}
        rows.append({"turns": num_turns, "tokens": num_tokens, "CPU s": seconds_of})
        strict, ignore = (best[mode] / best[SanityMode.OFF] for mode in MODES[:2])
        ratios.append(f"{num_turns} turns {strict:.2f}")
        seconds = [f"{best[mode]:.2f}" for mode in MODES]
        table.add_row(str(num_turns), str(num_tokens), *seconds, f"{strict:.2f}", f"{ignore:.2f}")
    console = Console()
    console.print(table)
    write_rows(args.out, rows)
    console.print(f"sanity check: strict / off at {', '.join(ratios)}", soft_wrap=True)


if __name__ == "__main__":
    main()
