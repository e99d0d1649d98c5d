"""`actor_rollout_ref.rollout`: how trajectories are sampled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from verl_mt.config.declare import Condition, Section, conflicts, is_set, option, switched_on
from verl_mt.plugins import Registry, names_code

_ROLLOUT = "actor_rollout_ref.rollout"
WITHOUT_GROUPS = ("reinforce_plus_plus", "gae", "remax")
"""Estimators whose advantage of a trajectory does not depend on the others of its prompt: one sample will do."""
VALIDATES = is_set("data.val_files")
GENERATES = is_set(f"{_ROLLOUT}.custom_generate_function_path")
_HAS_INTERACTION = is_set(f"{_ROLLOUT}.interaction_config_file")
_HAS_SCHEDULER = is_set(f"{_ROLLOUT}.multi_turn.scheduler")
_DEFAULT_ENVIRONMENT = is_set(f"{_ROLLOUT}.environment.path")
_HAS_ENVIRONMENT = _DEFAULT_ENVIRONMENT | is_set(f"{_ROLLOUT}.environment.named")
# verl's launch scripts say with `multi_turn.enable` alone whether several turns are wanted.
_HAS_TOOLS = (
    is_set(f"{_ROLLOUT}.tool_kwargs.tools_config_file")
    | GENERATES
    | _HAS_ENVIRONMENT
    | switched_on(f"{_ROLLOUT}.multi_turn.enable")
)
# An agent runs its calls itself, but they are read from the model's text here.
_READS_CALLS = _HAS_TOOLS | is_set(f"{_ROLLOUT}.agent_function_path")
_SEVERAL_TURNS = replace(
    _READS_CALLS | _HAS_INTERACTION | _HAS_SCHEDULER,
    text=lambda: (
        "there are tools, an environment, an interaction, a scheduler, a generate function, an agent or "
        "multi_turn.enable=True"
    ),
)
ENGINES: Registry[Any] = Registry(
    "inference engine",
    {
        "local": "verl_mt.engines.local.engine:LocalEngine",
        "scripted": "verl_mt.engines.scripted:ScriptedEngine",
    },
    group="verl_mt.engines",
)
"""Name -> the class of an inference engine, which is loaded when it is chosen."""
_HERE = ("local", "scripted")
OTHER_ENGINE = Condition(
    (f"{_ROLLOUT}.name",),
    lambda of: of(f"{_ROLLOUT}.name") not in _HERE,
    lambda: f"{_ROLLOUT}.name={' or '.join(name for name in ENGINES if name not in _HERE) or 'a custom engine'}",
)
"""An engine that is sent weights: SGLang, one of another package, or one of the user's."""


@dataclass
class MultiTurnConfig(Section):
    """`actor_rollout_ref.rollout.multi_turn`; `multi_turn: True` is short for `multi_turn.enable: True`."""

    enable: bool | None = option(
        None,
        "Several turns. null = on exactly when a tools or interaction file is set. False with one is refused.",
    )
    max_assistant_turns: int | None = option(
        None, "Assistant turns of one trajectory. null = no limit on them.", min=1, when=_SEVERAL_TURNS
    )
    max_user_turns: int | None = option(
        None,
        "Turns of the interaction (tool rounds are not user turns). null = no limit.",
        min=1,
        when=_SEVERAL_TURNS,
    )
    max_parallel_calls: int = option(
        8, "Tool calls of one assistant turn that are run. Further ones get an error.", min=1, when=_HAS_TOOLS
    )
    max_tool_calls: int | None = option(
        None,
        "Tool calls of one trajectory that are run. The model is told when they are used up. When it calls again in a "
        "later turn, the trajectory ends (stop reason max_tool_calls). null = no limit.",
        min=1,
        when=_HAS_TOOLS,
    )
    max_tool_response_tokens: int = option(
        512,
        "Longest tool result, or text of an interaction, in tokens. Longer ones are cut and counted.",
        min=8,
        when=_SEVERAL_TURNS,
    )
    tool_response_keep: str = option(
        "both",
        "Which part of an over-long tool result or interaction text is kept.",
        choices=("head", "tail", "both"),
        when=_SEVERAL_TURNS,
    )
    tool_timeout_s: float = option(
        30.0, "Deadline of one tool call in seconds, retries included.", min=0.001, when=_HAS_TOOLS
    )
    interaction_timeout_s: float = option(
        60.0,
        "Deadline in seconds of each call of the interaction, of each hook of the scheduler, and of each reset, reply, "
        "score and close of an environment.",
        min=0.001,
        when=_HAS_INTERACTION | _HAS_SCHEDULER | _HAS_ENVIRONMENT,
    )
    scheduler: str | None = option(
        None,
        "A MultiTurnScheduler that drives every conversation instead of the tool loop: a registered name, a dotted "
        "path or file.py:Name. null = the tool loop.",
    )
    scheduler_kwargs: dict[str, Any] = option(
        {}, "Arguments of its constructor, beside max_turns.", when=_HAS_SCHEDULER
    )
    loss_scale: str | None = option(
        None,
        "Which sampled tokens are trained: default (every assistant turn), last_round, a registered name or dotted "
        "path of a LossScale, several joined by +. `all` trains every token, prompts and observations too. null = "
        "default with several turns, else last_round.",
    )
    train_prompt_assistants: bool = option(
        False, "Also train the assistant messages of the data set's prompts (few-shot turns), which nobody sampled."
    )
    tool_retries: int = option(0, "How often a tool that raised or timed out is tried again.", min=0, when=_HAS_TOOLS)
    tool_argument_types: str = option(
        "refuse",
        "An argument of another simple type than the schema's (a number for text, '3' for 3): refuse = the model is "
        "told. convert = the tool gets it converted, counted in `tools/<name>/converted_arguments`.",
        choices=("refuse", "convert"),
        when=_HAS_TOOLS,
    )
    tool_concurrency: int = option(256, "Calls of one tool that run at once.", min=1, when=_HAS_TOOLS)
    tool_parser: str = option(
        "hermes",
        "How tool calls are read from the model's text. A registered name or a dotted path.",
        when=_READS_CALLS,
    )
    run_calls_in_unclosed_reasoning: bool | None = option(
        None,
        "A tool call in a thought that the turn does not close: True runs it, False leaves it a thought. null = as "
        "SGLang does for the models of the tool parser (docs/tool_parsers.md).",
        when=_READS_CALLS,
    )
    tokenization_sanity_check_mode: Any = option(
        "strict",
        "Compares the recorded tokens with the full rendered conversation: strict, ignore_strippable, off.",
        choices=("strict", "ignore_strippable", "off"),
        also={False: "off", "disable": "off"},
    )
    max_mismatch_rate: float | None = option(
        None,
        "Stop the run when more than this share of a step's trajectories mismatch. null = only warn.",
        min=0,
        max=1,
    )
    use_inference_chat_template: bool = option(
        False,
        "Show the model what production would show it (old reasoning dropped), in a new record per rewrite.",
    )

    def problems(self, config: Any, key: str) -> Iterator[str]:
        rollout, data = config.actor_rollout_ref.rollout, config.data
        tools = rollout.tool_kwargs.tools_config_file
        files = {"tool_kwargs.tools_config_file": tools, "interaction_config_file": rollout.interaction_config_file}
        if self.enable is False:
            given = {f"{_ROLLOUT}.{name}": file for name, file in files.items()}
            yield from conflicts(given, f"{key}.enable=False", "a tool or an interaction needs several turns")
        if self.use_inference_chat_template and not data.filter_overlong_prompts and data.truncation != "error":
            yield (
                f"{key}.use_inference_chat_template shows what production shows, never a cut prompt. data.truncation "
                f"is {data.truncation}: set data.filter_overlong_prompts=True or data.truncation=error"
            )
        if tools is not None and self.max_assistant_turns == 1:
            yield (
                f"{key}.max_assistant_turns is 1 but tools are configured ({tools}): no call could be answered. Set it "
                "to 2 or more, or to null"
            )


@dataclass
class ToolKwargs(Section):
    """`actor_rollout_ref.rollout.tool_kwargs`."""

    tools_config_file: str | None = option(None, "YAML file that declares the tools. null = no tools.")


@dataclass
class EnvironmentConfig(Section):
    """`actor_rollout_ref.rollout.environment`: what the conversations are played in (docs/environments.md)."""

    path: str | None = option(
        None,
        "Class of the environment: a registered name, dotted path or file.py:Name. null = none, or only those of "
        "`named`.",
    )
    config: dict[str, Any] = option({}, "Arguments of its constructor.", when=_DEFAULT_ENVIRONMENT)
    named: dict[str, Any] = option(
        {},
        "Further environments, name -> path, or name -> {path, config}. The column `environment` of a row picks one.",
    )

    @property
    def is_configured(self) -> bool:
        """Whether conversations are played in environments."""
        return bool(self.path or self.named)

    def problems(self, config: Any, key: str) -> Iterator[str]:
        rollout = config.actor_rollout_ref.rollout
        others = {
            "multi_turn.scheduler": rollout.multi_turn.scheduler,
            "custom_generate_function_path": rollout.custom_generate_function_path,
            "agent_function_path": rollout.agent_function_path,
            "multi_turn.enable": "False" if rollout.multi_turn.enable is False else None,
        }
        if self.is_configured:
            given = {f"{_ROLLOUT}.{name}": value for name, value in others.items()}
            yield from conflicts(given, key, "an environment is played by the tool loop, over several turns")


@dataclass
class ValSampling(Section):
    """`actor_rollout_ref.rollout.val_kwargs`: how validation samples."""

    n: int = option(1, "Samples per validation prompt.", min=1)
    temperature: float = option(1.0, "Sampling temperature of validation.", min=0)
    top_p: float = option(1.0, "Nucleus of validation.", min=1e-6, max=1)
    top_k: int = option(-1, "-1 or 0 = off.", min=1, off=-1, also={0: -1})
    min_p: float = option(0.0, "0 = off.", min=0, below=1)
    greedy_too: bool = option(True, "Also validate greedily (`val/accuracy_greedy`).")


@dataclass
class TraceConfig(Section):
    """`actor_rollout_ref.rollout.trace`."""

    backend: str | None = option(
        None,
        "Spans of every rollout (trajectory, turn, prefill, decode, tool, reward): otel = by OTLP over HTTP to "
        "OTEL_EXPORTER_OTLP_ENDPOINT. otel_file = spans.jsonl of the run directory. null = none.",
        choices=(None, "otel", "otel_file"),
    )


@dataclass
class RolloutConfig(Section):
    """`actor_rollout_ref.rollout`."""

    name: str = option(
        "local",
        "Inference engine, or the dotted path or file.py:name of a custom one (docs/your_own_engine.md).",
        choices=ENGINES,
        plugin=True,
    )
    mode: str = option(
        "async",
        "async = a conversation's next turn begins as soon as it is asked for. sync = turns in lock-step batches.",
        choices=("async", "sync"),
    )
    on_update: str = option(
        "continue",
        "What new weights do to turns that are being sampled: continue = they go on with them, token by token. "
        "finish_turn = weights wait for their ends, so that each turn is by one version, and the trainer with them. "
        "restart = conversations that have sampled begin again, so that each is by one version.",
        choices=("continue", "finish_turn", "restart"),
        when=is_set("trainer.max_staleness"),
    )
    n: int = option(8, "Samples per prompt (the group).", min=1)
    temperature: float = option(1.0, "Sampling temperature. Log-probs are of logits / temperature.", min=0)
    top_p: float = option(1.0, "Nucleus sampling. Below 1 is refused for training.", min=1e-6, max=1)
    top_k: int = option(-1, "-1 or 0 = off. Other values are refused for training.", min=1, off=-1, also={0: -1})
    min_p: float = option(0.0, "0 = off. Other values are refused for training.", min=0, below=1)
    stop: list[str] = option([], "Strings that end an assistant turn (kept).")
    stop_token_ids: list[int] = option([], "Token ids that end an assistant turn (kept), beside the template's own.")
    response_length: int = option(512, "Everything after the first prompt, observations included, in tokens.", min=1)
    max_tokens_per_turn: int | None = option(None, "Longest assistant turn in tokens. null = `response_length`.", min=1)
    max_model_len: int | None = option(None, "Longest sequence in tokens. null = prompt + response length.", min=2)
    max_seconds: float | None = option(None, "Wall-clock limit of one trajectory in seconds. null = none.", min=0.001)
    request_timeout_s: float = option(
        600.0, "Deadline in seconds of an engine request. SGLang and vLLM: seconds without a token of it.", min=0.001
    )
    max_concurrent: int | None = option(
        None,
        "Trajectories that live at once. null = all, with the local engine as many of a step as `max_num_seqs`.",
        min=1,
    )
    max_retries: int = option(2, "How often a trajectory is started again after the engine went away.", min=0)
    max_num_seqs: int = option(256, "Sequences that the engine decodes at once.", min=1)
    dtype: str | None = option(
        None, "Weights of the engine. null = the actor's.", choices=(None, "float32", "bfloat16", "float16")
    )
    engine_kwargs: dict[str, Any] = option({}, "Passed to the engine as they are.", when=OTHER_ENGINE)
    engine_timeout_s: float = option(
        600.0,
        "Deadline in seconds of an engine's start, and of each call that is not a request (weights, pause).",
        min=0.001,
        when=OTHER_ENGINE,
    )
    weight_sync_dir: str | None = option(
        None,
        "Folder of the weights' files, if the engine reads new weights from files. null = in the run directory.",
        when=OTHER_ENGINE,
    )
    update_weights_bucket_megabytes: int = option(
        512, "Weights travel in pieces of this size.", min=1, when=OTHER_ENGINE
    )
    multi_turn: MultiTurnConfig = option(MultiTurnConfig, "Turns, tools' limits and the sanity check.")
    tool_kwargs: ToolKwargs = option(ToolKwargs, "Where the tools are declared.")
    environment: EnvironmentConfig = option(EnvironmentConfig, "What the conversations are played in.")
    agent_function_path: str | None = option(
        None,
        "A custom agent, `(row, base_url, api_key)`, that talks to an OpenAI-compatible URL. Dotted path or "
        "file.py:function. null = none.",
    )
    custom_generate_function_path: str | None = option(
        None,
        "Async function `generate(args, sample, sampling_params)` that drives every conversation instead of the tool "
        "loop: a dotted path or file.py:name. null = the tool loop.",
    )
    custom_generate_kwargs: dict[str, Any] = option(
        {}, "Own settings of that function: attributes of its `args`.", when=GENERATES
    )
    interaction_config_file: str | None = option(None, "YAML file that declares the interactions. null = none.")
    trace: TraceConfig = option(TraceConfig, "Spans for OpenTelemetry.")
    val_kwargs: ValSampling = option(ValSampling, "Sampling of validation.", when=VALIDATES)

    def problems(self, config: Any, key: str) -> Iterator[str]:
        prompt, estimator = config.data.max_prompt_length, config.algorithm.adv_estimator
        if "" in self.stop:
            yield f"{key}.stop is {self.stop}: an empty string would end every turn at once. Leave it out"
        if self.max_model_len is not None and self.max_model_len <= prompt:
            yield (
                f"{key}.max_model_len ({self.max_model_len}) has no token left after a prompt of "
                f"data.max_prompt_length ({prompt}) tokens"
            )
        if config.trainer.val_only:
            return
        for name, off in {"top_p": 1.0, "top_k": -1, "min_p": 0.0}.items():
            if (value := getattr(self, name)) != off:
                yield (
                    f"{key}.{name} is {value}: training needs the full distribution, because the trainer's log-probs "
                    f"are over the whole vocabulary. Set it to {off} (validation may use val_kwargs.{name})"
                )
        if self.temperature == 0:
            yield f"{key}.temperature is 0: greedy samples of a group are all alike. Training needs more than 0"
        compares = estimator not in WITHOUT_GROUPS and not names_code(estimator)
        if self.n == 1 and compares and self.custom_generate_function_path is None:
            yield (
                f"{key}.n is 1: {estimator} compares the samples of one prompt and needs at least 2 (1 is possible "
                f"with algorithm.adv_estimator={', '.join(WITHOUT_GROUPS)}, or with a custom generate function that "
                "returns several Samples)"
            )
