"""Keys of rollouts."""

from __future__ import annotations

import effect_parts as parts
import effect_probes as probes
from effect_engines import hosts, late_server, sglang, vllm
from effect_kinds import GENERATES, MO, MT, NO_TOOLS, NOT_VALIDATED, RO, VALIDATES, Effect, tool, user
from effect_probes import metric, talk


def late() -> str:
    return f"{RO}.servers=['{late_server()}']"


def around(overrides: tuple[str, ...]) -> str:
    """What the trainer's runner asks for turns, where a script samples."""
    from verl_mt.engines.scripted import ScriptedEngine
    from verl_mt.trainer.build_rollout import build_chat, build_runner, build_tools

    config = probes.compose([*overrides])
    runner = build_runner(config, build_chat(config), build_tools(config), None, ScriptedEngine([]), overlaps=True)
    return type(runner.context.engine).__name__


def kernels(overrides: tuple[str, ...]) -> bool:
    """Whether the local engine computes with torch's operators."""
    from verl_mt.engines.base import EngineSetup
    from verl_mt.engines.local.model_runner import PackedForward
    from verl_mt.extensions.cpu_kernels.choice import local_forward
    from verl_mt.modeling.load import load_causal_lm

    config = probes.compose([*overrides]).actor_rollout_ref
    module = load_causal_lm("verl_mt://tiny")
    return local_forward(EngineSetup(config, module, frozenset(), None, 64, False, seed=0)) is PackedForward


AHEAD = ("trainer.max_staleness=1", "trainer.deterministic=False")
SGLANG = (f"{RO}.name=sglang",)
ON_RAY = (*SGLANG, "trainer.placement=ray")
MAZE = (NO_TOOLS, f"{RO}.environment.path=effect_parts:Maze")
IN_MAZE = (NO_TOOLS, "data.val_files=effect_parts:in_maze")
ROLLOUT = {
    "name": Effect(
        "scripted",
        "no engine from a command",
        probes.printed,
        NOT_VALIDATED,
        refused="pass engine=ScriptedEngine(turns)",
    ),
    "mode": Effect("sync", "turns in lock step", talk("answers")),
    "on_update": Effect("finish_turn", "what stands around the engine", around, AHEAD),
    "n": Effect("2", "samples of a prompt", metric("rollout/trajectories"), NOT_VALIDATED),
    "temperature": Effect("0.3", "what is sampled", probes.rows, NOT_VALIDATED),
    "top_p": Effect("0.9", "refused for training", probes.placed, refused="full distribution", quick=True),
    "top_k": Effect("5", "refused for training", probes.placed, refused="full distribution"),
    "min_p": Effect("0.1", "refused for training", probes.placed, refused="full distribution"),
    "stop": Effect("['\"}']", "where a turn ends", talk("calls once")),
    "stop_token_ids": Effect("[274]", "where a turn ends", talk("calls once")),
    "response_length": Effect("30", "when a conversation is cut", talk("calls always"), quick=True),
    "max_tokens_per_turn": Effect("9", "when a turn is cut", talk("calls once")),
    "max_model_len": Effect("130", "when a conversation is cut", talk("calls always"), ("data.max_prompt_length=120",)),
    "max_seconds": Effect("0.2", "a slow conversation ends", talk("calls always", latency_s=0.15)),
    "request_timeout_s": Effect("0.1", "a slow request is given up", talk("answers", latency_s=0.3)),
    "max_concurrent": Effect("1", "one after the other", talk("answers", latency_s=0.05, n=3)),
    "max_retries": Effect("0", "an engine that fails once is not asked again", talk("answers", fail_at=(1,))),
    "num_workers": Effect("2", "no lock step", probes.placed, (f"{RO}.mode=sync",), refused="in lock-step"),
    "kernels": Effect("torch", "what a step is computed with", kernels),
    "max_num_seqs": Effect("3", "how many are decoded at once", sglang),
    "tensor_model_parallel_size": Effect("2", "ranks of the server", sglang),
    "gpu_memory_utilization": Effect("0.3", "memory of the server", sglang),
    "free_cache_engine": Effect("False", "the server keeps its memory", sglang),
    "dtype": Effect("bfloat16", "weights of the server", sglang),
    "engine_kwargs": Effect("{chunked_prefill_size: 64}", "its own arguments", sglang),
    "engine_timeout_s": Effect("0.1", "a server that is slow is given up", sglang, (late,)),
    "placement": Effect("separate", "where no devices are named for it", probes.placed, SGLANG, refused="nnodes is 0"),
    "nnodes": Effect("2", "machines of engines", hosts, ON_RAY),
    "n_workers_per_node": Effect("3", "their devices", hosts, (*ON_RAY, f"{RO}.nnodes=1")),
    "servers": Effect(lambda: f"['{late_server()}']", "who is asked instead of started", sglang),
    "python": Effect("/bin/sh", "which interpreter runs the engine", vllm),
    "launch_servers": Effect("2", "how many servers", sglang),
    "lora_updates": Effect("merged", "what an update of LoRA sends", vllm, ("actor_rollout_ref.model.lora_rank=4",)),
    "weight_transport": Effect("disk", "how weights travel", sglang),
    "weight_sync_dir": Effect(
        lambda: str(parts.folder() / "other"), "where files lie", sglang, (f"{RO}.weight_transport=disk",)
    ),
    "update_weights_bucket_megabytes": Effect("1", "pieces of weights", sglang),
    "agent_function_path": Effect(
        "effect_parts:agent",
        "who drives a conversation",
        talk("answers"),
        (NO_TOOLS,),
    ),
    "custom_generate_function_path": Effect(
        "effect_parts:generate",
        "who drives a conversation",
        talk("answers"),
        (NO_TOOLS,),
    ),
    "custom_generate_kwargs": Effect("{own: 5}", "what the function is given", talk("answers"), GENERATES),
    "interaction_config_file": Effect(lambda: parts.interaction_file("Patient"), "a user answers", talk("answers")),
    "environment.path": Effect("effect_parts:Maze", "the prompt", talk("answers"), (NO_TOOLS,)),
    "environment.config": Effect("{size: 1}", "what the class is made with", talk("answers"), MAZE),
    "environment.named": Effect("{maze: effect_parts:Maze}", "the prompt", talk("answers"), IN_MAZE),
    "tool_kwargs.tools_config_file": Effect("null", "the prompt shows no tools", probes.drawn),
    "trace.backend": Effect("otel_file", "a file of spans", probes.files, NOT_VALIDATED),
    "val_kwargs.n": Effect("2", "samples of a validation prompt", probes.val_rows, VALIDATES),
    "val_kwargs.temperature": Effect("5.0", "what validation samples", probes.val_rows, VALIDATES),
    "val_kwargs.top_p": Effect(
        "0.01", "what validation samples", probes.val_rows, (*VALIDATES, f"{RO}.val_kwargs.temperature=5")
    ),
    "val_kwargs.top_k": Effect(
        "1", "what validation samples", probes.val_rows, (*VALIDATES, f"{RO}.val_kwargs.temperature=5")
    ),
    "val_kwargs.min_p": Effect(
        "0.99", "what validation samples", probes.val_rows, (*VALIDATES, f"{RO}.val_kwargs.temperature=5")
    ),
    "val_kwargs.greedy_too": Effect("False", "no greedy pass", metric("val/accuracy_greedy"), VALIDATES),
}

MULTI_TURN = {
    "enable": Effect(
        "False",
        "one turn: who gives an interaction is refused",
        talk("answers"),
        (NO_TOOLS, user("Patient")),
        refused="needs several turns",
    ),
    "max_assistant_turns": Effect("2", "turns", talk("calls always"), (f"{RO}.response_length=400",)),
    "max_user_turns": Effect("1", "turns of the user", talk("answers"), (user("Patient"),)),
    "max_parallel_calls": Effect("1", "the second call is an error", talk("calls twice at once")),
    "max_tool_calls": Effect("1", "the second call is not run", talk("calls twice at once")),
    "max_tool_response_tokens": Effect(
        "20", "a long result is cut", talk("calls once"), (tool("Long"), f"{RO}.response_length=400")
    ),
    "tool_response_keep": Effect(
        "head",
        "which part is kept",
        talk("calls once"),
        (tool("Long"), f"{MT}.max_tool_response_tokens=40", f"{RO}.response_length=400"),
    ),
    "tool_timeout_s": Effect("0.05", "a slow tool is given up", talk("calls once"), (tool("Slow"),)),
    "interaction_timeout_s": Effect("0.05", "a slow user is given up", talk("answers"), (user("Sleepy"),)),
    "scheduler": Effect(
        "effect_parts.Twice",
        "who decides what is asked",
        talk("answers"),
        (NO_TOOLS,),
    ),
    "scheduler_kwargs": Effect(
        "{word: other}",
        "what it says",
        talk("answers"),
        (f"{MT}.scheduler=effect_parts.Twice", NO_TOOLS),
    ),
    "loss_scale": Effect("last_round", "only the last turn is trained", talk("calls once")),
    "train_prompt_assistants": Effect(
        "True", "few-shot answers are trained", talk("answers"), ("data.val_files=effect_parts:few_shot",)
    ),
    "tool_retries": Effect("1", "a tool that failed once answers", talk("calls once"), (tool("Flaky"),)),
    "tool_argument_types": Effect("convert", "a number reaches a tool that wants text", talk("calls with a number")),
    "tool_concurrency": Effect("1", "calls at once", talk("calls twice at once"), (tool("Slow"),)),
    "tool_parser": Effect(
        "mistral",
        "a parser that cannot read the template's calls is refused",
        talk("calls once"),
        refused="cannot read the tool calls",
    ),
    "run_calls_in_unclosed_reasoning": Effect(
        "True", "a call in a thought that is not closed is run", talk("calls in its thought"), quick=True
    ),
    "tokenization_sanity_check_mode": Effect("off", "no finding", talk("writes before its call")),
    "max_mismatch_rate": Effect(
        "0.0", "a mismatch ends the run", talk("writes before its call"), refused="max_mismatch_rate allows"
    ),
    "use_inference_chat_template": Effect(
        "True",
        "a record for each rewrite",
        talk("thinks"),
        (
            lambda: f"{MO}.custom_chat_template={parts.template_file('forgetful')}",
            user("Patient"),
            NO_TOOLS,
            f"{MT}.max_user_turns=1",
        ),
    ),
}
