"""What a conversation meets on its way: template, end of turn, tools and calls that are read back, interactions; rows,
prompts, reward and the steps they make; and a whole scripted conversation: one tool call with made-up arguments, then
an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from verl_mt.chat.differences import Cause, closed_opening
from verl_mt.chat.parser_fit import require_parser, written_call
from verl_mt.chat.parsers import get_parser
from verl_mt.data.conversation import Message
from verl_mt.data.large_files import LargeRows
from verl_mt.data.trajectory import Status, StopReason
from verl_mt.environments.kinds import EnvironmentTools
from verl_mt.errors import DataError
from verl_mt.extensions.inspection.doctor.findings import Finding, Subject, error, not_looked_at, ok, warning
from verl_mt.extensions.inspection.doctor.tool_calls import ANSWER, talk_of, tool_trouble
from verl_mt.interactions.session import load_interactions
from verl_mt.plugins import extension_function
from verl_mt.rollout.context import is_multi_turn
from verl_mt.trainer import build_data, build_rollout
from verl_mt.workers.optimizer import warmup_steps_of
from verl_mt.workers.trainable import steps_of_actor, updates_per_step

_ROLLOUT = "actor_rollout_ref.rollout"
_MAX_ROWS = 16
"""Rows of each entry whose prompts are rendered."""
_MAX_PROMPTS = 2
_NUM_NAMED = 12
"""Tools that a line names."""
_LIMITS: dict[StopReason | None, Callable[[Subject], object]] = {
    StopReason.MAX_TOKENS_PER_TURN: lambda subject: subject.rollout.max_tokens_per_turn,
    StopReason.RESPONSE_LENGTH: lambda subject: subject.rollout.response_length,
    StopReason.MAX_MODEL_LEN: lambda subject: subject.max_model_len,
}


def template(subject: Subject) -> Iterator[Finding]:
    """Tokenizer and chat template load, and can render what the run asks of them."""
    chat = subject.chat = build_rollout.build_chat(subject.config)
    history = chat.capabilities.history
    words = f"rewrites history: {', '.join(history)}" if history else "only appends (measured on three plain turns)"
    yield ok(f"{type(chat.tokenizer).__name__} with {len(chat.tokenizer)} tokens. The template {words}")
    if chat.capabilities.uses_clock:
        yield warning(
            "the chat template reads the clock: the prompts of two days differ, and a resumed run is another one",
            "give the date as actor_rollout_ref.model.template_kwargs, or a custom_chat_template without it",
        )


def stop_tokens(subject: Subject) -> Iterator[Finding]:
    """Turns end where the template says, and what ends them besides exists."""
    chat, rollout = subject.known_chat, subject.rollout
    ends = chat.stop_token_ids
    if not ends:
        yield error(
            "neither the template nor the model's generation_config names a token that ends a turn: every turn would "
            "be cut by length",
            f"set {_ROLLOUT}.stop_token_ids, or repair the model folder's generation_config.json (eos_token_id)",
        )
        return
    size = len(chat.tokenizer)
    unknown = [i for i in rollout.stop_token_ids if not 0 <= i < size]
    if unknown:
        yield error(
            f"{_ROLLOUT}.stop_token_ids: {unknown} are no tokens of this tokenizer, which has {size}",
            "give ids of this tokenizer. tokenizer.convert_tokens_to_ids finds them",
        )
    for text in rollout.stop:
        if any(text in chat.decode([i]) for i in ends):
            yield warning(
                f"{_ROLLOUT}.stop holds {text!r}, which is the text of a token that ends turns anyway",
                "leave it out: looking for strings costs time at every token",
            )
    asked: list[Message] = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": ANSWER}]
    if not set(chat.full_ids(asked)[len(chat.full_ids(asked[:1])) :]) & chat.end_token_ids:
        yield warning(
            "the chat template writes no end behind what an assistant said, so a model sees turns that never end and "
            "learns from a cold start to write none",
            "repair the end of turn in actor_rollout_ref.model.custom_chat_template (or the model's chat_template)",
        )
    written = ", ".join(f"{chat.decode([i])!r} ({i})" for i in sorted(ends)[:4])
    yield ok(f"a turn ends at {written}")


def tools(subject: Subject) -> Iterator[Finding]:
    """The YAML's tools are made."""
    found = subject.tools = build_rollout.build_tools(subject.config)
    if found is None:
        yield ok("none are configured")
        return
    rest = len(found.names) - _NUM_NAMED
    yield ok(", ".join(found.names[:_NUM_NAMED]) + (f" and {rest} more" if rest > 0 else ""))


def tool_calls(subject: Subject) -> Iterator[Finding]:
    """A call as the template writes it is read back by the parser."""
    rollout, chat = subject.rollout, subject.known_chat
    driven = rollout.custom_generate_function_path or rollout.agent_function_path
    if subject.tools is None or driven or not is_multi_turn(rollout):
        yield ok("no calls to read" if driven is None else "your function reads them")
        return
    name = rollout.multi_turn.tool_parser
    note = require_parser(chat, name, get_parser(name))
    if note is not None:
        yield warning(note, f"give {_ROLLOUT}.multi_turn.tool_parser that reads the form your model writes")
        return
    written = written_call(chat)
    how = "a grammar that a prompt teaches" if written is None else "a call that the template writes comes back whole"
    yield ok(f"{name}: {how}")


def interactions(subject: Subject) -> Iterator[Finding]:
    """The YAML's interactions are made."""
    path = subject.rollout.interaction_config_file
    subject.interactions = load_interactions(path) if path else {}
    yield ok(", ".join(subject.interactions) or "none are configured")


def reward(subject: Subject) -> Iterator[Finding]:
    """The reward loads."""
    subject.reward = build_rollout.build_reward(subject.config)
    by_default = "the environment's score" if subject.rollout.environment.is_configured else "by the rows' data_source"
    yield ok(subject.config.reward.path or by_default)


def rows(subject: Subject) -> Iterator[Finding]:
    """The files are there and every row has the columns that it needs; of files that a run does not load, the first."""
    subject.train = build_data.open_train_rows(subject.config)
    found = f"{subject.num_rows} training rows of {', '.join(s.name for s in subject.train)}"
    large = [s.name for s in subject.train if isinstance(s.rows, LargeRows)]
    if large:
        found += f"; of {', '.join(large)} only the first {_MAX_ROWS} are looked at (data.eager_rows)"
    yield ok(found)
    if subject.config.data.val_files is None:
        return
    if not build_data.many_val_rows(subject.config):
        subject.val = build_data.load_val_rows(subject.config)
        yield ok(f"{sum(len(s.rows) for s in subject.val)} validation rows")
        return
    yield warning(
        "data.val_files hold more rows than data.eager_rows, and were not looked at: a run loads and renders all of "
        "them before its first step, and samples all at each validation",
        "take fewer with data.val_max_samples",
    )


def prompts(subject: Subject) -> Iterator[Finding]:
    """A few rows become prompts; their rows' own arguments fit the tools, and something scores them."""
    builder = build_data.build_prompts(subject.config, subject.known_chat, subject.tools)
    few = [row for source in subject.train for row in source.rows[:_MAX_ROWS]]
    try:
        kept = builder.keep(few)
    except DataError as raised:
        yield error(str(raised), "")
        return
    subject.prompts = [prompt for row in kept if (prompt := builder.build(row)) is not None]
    longest = max(len(p.ids) for p in subject.prompts)
    if longest:
        yield ok(f"{len(few)} rendered, the longest has {longest} tokens (limit {builder.max_prompt_length})")
    else:
        yield ok(f"{len(few)} rows, whose environments make the prompts (limit {builder.max_prompt_length} tokens)")
    if builder.num_filtered * 5 > len(few):
        yield warning(
            f"{builder.num_filtered} of the first {len(few)} prompts are over-long and would be left out",
            "raise data.max_prompt_length, or shorten prompts and tool schemas",
        )
    assert subject.reward is not None
    for prompt in subject.prompts:
        subject.reward.check(prompt.row)


def environment(subject: Subject) -> Iterator[Finding]:
    """Siblings share no state: `verl-mt env check`, with the first rows."""
    if not isinstance(subject.tools, EnvironmentTools):
        yield ok("none is configured")
        return
    for kind in subject.tools.kinds.values():
        rows = [row.raw for row in subject.train_rows() if subject.tools.kind_of(row.raw) is kind]
        if not rows:
            yield not_looked_at(f"no row names {kind.name}")
            continue
        lines = extension_function("check_environment")(kind, rows[:2])
        for line in lines:
            if line.verdict == "wrong":
                yield warning(f"{line.what}: {line.text}", "run verl-mt env check (docs/environments.md)")
        if all(line.verdict != "wrong" for line in lines):
            yield ok(f"{kind.title}: siblings share nothing, answers are the same twice, and all are closed once")


def schedule(subject: Subject) -> Iterator[Finding]:
    """The rows make the steps that are asked for, and the schedule fits into them."""
    config, trainer = subject.config, subject.config.trainer
    batch, steps = config.data.train_batch_size, subject.total_steps
    if trainer.val_only:
        yield ok("validation only")
        return
    if steps == 0 and trainer.total_training_steps != 0:
        yield error(
            f"data.train_batch_size={batch} with {subject.num_rows} rows and trainer.total_epochs="
            f"{trainer.total_epochs} is not one step",
            "lower the batch size, raise total_epochs, or give more rows",
        )
        return
    wanted = trainer.total_training_steps
    if wanted is not None and steps < wanted:
        yield warning(
            f"trainer.total_training_steps={wanted}, but the rows end after {steps} steps",
            "raise trainer.total_epochs, or lower total_training_steps",
        )
    optim = config.actor_rollout_ref.actor.optim
    actor = config.actor_rollout_ref.actor
    per_step = updates_per_step(actor.ppo_epochs, actor.ppo_mini_batch_size, batch)
    updates = steps_of_actor(steps, trainer.critic_warmup) * per_step if steps else 0
    if (warmup := warmup_steps_of(optim, updates)) >= updates > 0:
        name = "lr_warmup_steps_ratio" if optim.lr_warmup_steps_ratio else "lr_warmup_steps"
        yield warning(
            f"optim.{name}={getattr(optim, name)} of {updates} updates: the peak rate is reached "
            f"{'never' if warmup > updates else 'by the last one only'}",
            f"lower actor_rollout_ref.actor.optim.{name}",
        )
    if optim.lr == 0:
        yield warning("the learning rate is 0: nothing will change", "set actor_rollout_ref.actor.optim.lr")
    sequences = batch * subject.rollout.n
    if sequences % subject.num_ranks:
        yield warning(
            f"{sequences} sequences over {subject.num_ranks} ranks do not come out even: some ranks wait for others",
            "choose data.train_batch_size x rollout.n as a multiple of the ranks",
        )
    if config.data.val_files is None:
        yield ok(f"{steps} steps of {batch} prompts x {subject.rollout.n} samples. Nothing is validated")
    else:
        yield ok(f"{steps} steps of {batch} prompts x {subject.rollout.n} samples")


def rollout(subject: Subject) -> Iterator[Finding]:
    """Rows go through tools, interaction, limits, masks and reward as in a run; only the model is a script."""
    talks = [talk_of(subject, prompt) for prompt in subject.prompts[:_MAX_PROMPTS]]
    found = subject.open_stage().play(talks, samples=2)
    failed = [t for t in found if t.status in (Status.FAILED, Status.ABORTED)]
    if failed:
        reason = (failed[0].error or "no error was recorded").strip().splitlines()[-1]
        yield error(
            f"{len(failed)} of {len(found)} trajectories {failed[0].status}: {reason}",
            "a run would count them and train without them. Repair what raised",
        )
        return
    yield from tool_trouble(subject, found)
    idle = [t for t in found if not t.trainable]
    if idle:
        yield error(
            f"{len(idle)} of {len(found)} trajectories have no trained token (stop reason {idle[0].stop_reason})",
            "look at actor_rollout_ref.rollout.multi_turn.loss_scale, and at masks that the generate function sets",
        )
    counted = [cause for t in found if t.sanity for cause in t.sanity["counted"] or ()]
    meant = any(t.sanity and Cause.GENERATION_PROMPT in t.sanity["causes"] for t in found)
    if meant:
        yield ok(
            f"earlier turns keep {closed_opening(subject.known_chat.generation_prompt_text)!r}, which the template's "
            "generation prompt writes and its rendering of finished turns does not show (docs/multiturn.md)"
        )
    if counted:
        yield warning(
            f"the sanity check finds a mismatch: {counted[0]}",
            "verl-mt doctor --only template --model PATH says why, and docs/templates.md what to do",
        )
    # A simulated user who is never content asks on until something is full: that comes after the answer.
    longest = max(len(talk.turns) for talk in talks)
    cut = Counter(t.stop_reason for t in found if t.stop_reason in _LIMITS and t.num_turns <= longest)
    if cut.total() == len(found):
        yield warning(
            f"all {len(found)} scripted conversations (a call, where there is a tool, and one short line) were cut: "
            f"{', '.join(f'{reason}={_LIMITS[reason](subject)}' for reason in cut)}",
            "raise what cut them (actor_rollout_ref.rollout.response_length, max_tokens_per_turn, max_model_len): a "
            "model that never comes to its answer is never rewarded",
        )
    stops = Counter(str(t.stop_reason) for t in found)
    rewards = sorted({f"{t.reward:.4g}" for t in found if t.reward is not None})
    yield ok(
        f"{len(found)} trajectories, {', '.join(f'{n} {reason}' for reason, n in stops.items())}. "
        f"Reward of the scripted answer: {', '.join(rewards) or 'none'}"
    )
