"""Keys of rows, the model and rewards."""

from __future__ import annotations

import effect_parts as parts
import effect_probes as probes
from effect_kinds import (
    BROKEN_HUB,
    GENERATES,
    MO,
    MT,
    NO_TOOLS,
    NOT_VALIDATED,
    RO,
    TINY_ROWS,
    VALIDATES,
    Effect,
    tool,
    user,
)
from effect_probes import metric, talk

OTHER = "effect_parts:other_rows"
RECOMPILED = (f"{MO}.enable_gradient_checkpointing=True", "actor_rollout_ref.actor.compile_layers=True")
OTHER_COLUMNS = (f"data.train_files={OTHER}", "data.val_files=null")
DATA = {
    "train_files": Effect("effect_parts:other_rows", "other rows are drawn", probes.drawn),
    "val_files": Effect("effect_parts:other_rows", "other rows are validated", probes.drawn),
    "train_max_samples": Effect("5", "as many rows", probes.drawn, quick=True),
    "val_max_samples": Effect("1", "as many rows", probes.drawn),
    "eager_rows": Effect(
        "3",
        "an over-long row is not known before it is drawn",
        probes.drawn,
        (lambda: f"data.train_files={parts.rows_file('long')}", "data.val_files=null"),
    ),
    "on_bad_row": Effect(
        "skip",
        "it is left out",
        probes.drawn,
        (lambda: f"data.train_files={parts.rows_file('bad')}", "data.val_files=null"),
        refused="row 2, column prompt: expected messages",
    ),
    "train_batch_size": Effect("1", "trajectories per step", metric("rollout/trajectories"), NOT_VALIDATED),
    "over_sample": Effect(
        "1.5",
        "prompts are left for later steps",
        metric("rollout/prompts_in_flight"),
        ("trainer.deterministic=False", *NOT_VALIDATED),
    ),
    "val_batch_size": Effect("1", "validation in two parts", probes.val_rows, VALIDATES),
    "max_prompt_length": Effect("105", "longer prompts are left out", probes.drawn, ("data.val_files=null",)),
    "filter_overlong_prompts": Effect(
        "False",
        "they are cut instead",
        probes.drawn,
        ("data.val_files=null", "data.max_prompt_length=105", "data.truncation=left"),
    ),
    "truncation": Effect(
        "right",
        "which end is kept",
        probes.drawn,
        ("data.max_prompt_length=105", "data.filter_overlong_prompts=False", "data.truncation=left"),
    ),
    "prompt_key": Effect("other_prompt", "another column", probes.drawn, OTHER_COLUMNS),
    "label_key": Effect("other_label", "another column", probes.drawn, OTHER_COLUMNS),
    "columns": Effect("{other_prompt: prompt}", "another column", probes.drawn, OTHER_COLUMNS),
    "system": Effect(
        "be brief", "a message before each prompt", probes.drawn, (*OTHER_COLUMNS, "data.prompt_key=other_prompt")
    ),
    "apply_chat_template": Effect("False", "the function gets messages", talk("answers"), GENERATES),
    "shuffle": Effect("False", "the order of rows", probes.drawn),
    "seed": Effect("5", "order, and generated rows", probes.drawn),
    "val_seed": Effect("5", "generated rows of validation", probes.drawn),
    "mixing": Effect(
        "weights",
        "a source of weight 0.9 comes more often; by size its weight would be ignored, which is refused",
        probes.drawn,
        (f"data.train_files={{a: {{path: '{TINY_ROWS}', weight: 0.9}}, b: {{path: '{OTHER}', weight: 0.1}}}}",),
        refused="would ignore",
    ),
    "sampler": Effect("effect_parts.Backwards", "the order of rows", probes.drawn, ("data.shuffle=False",)),
    "sampler_kwargs": Effect("{start: 4}", "where it begins", probes.drawn, ("data.sampler=effect_parts.Backwards",)),
}

MODEL = {
    "path": Effect(parts.other_model, "other weights", probes.model),
    "revision": Effect("v2", "that revision is looked for", probes.model, BROKEN_HUB, refused="(revision v2)"),
    "tokenizer_path": Effect(parts.other_tokenizer, "other ids", probes.chat),
    "custom_chat_template": Effect(lambda: parts.template_file("own"), "other ids", probes.chat, (NO_TOOLS,)),
    "template_kwargs": Effect(
        "{prefix: 7}",
        "a variable of the template",
        probes.chat,
        (lambda: f"{MO}.custom_chat_template={parts.template_file('own')}", NO_TOOLS),
    ),
    "trust_prompts": Effect(
        "False",
        "control tokens in a prompt become text",
        probes.drawn,
        ("data.train_files=effect_parts:with_control_tokens",),
    ),
    "trust_remote_code": Effect(
        "True",
        "code of the model's folder runs",
        probes.model,
        (lambda: f"{MO}.path={parts.model_with_code()}",),
        refused="custom code",
    ),
    "dtype": Effect("bfloat16", "type of the weights", probes.model),
    "attn_implementation": Effect("eager", "the attention of the module", probes.model),
    "lora_rank": Effect("4", "adapters are trained", probes.model),
    "lora_alpha": Effect("32", "how adapters are scaled", probes.model, (f"{MO}.lora_rank=4",)),
    "lora_target_modules": Effect("[q_proj]", "fewer of them", probes.model, (f"{MO}.lora_rank=4",)),
    "freeze_vision": Effect(
        "True", "fewer weights are trained", probes.model, (lambda: f"{MO}.path={parts.model_that_sees()}",)
    ),
    "enable_gradient_checkpointing": Effect("True", "the module recomputes", probes.model),
    "recompute": Effect("elementwise", "a compiled layer", probes.placed, RECOMPILED, refused="does not go with"),
    "use_remove_padding": Effect("False", "shapes of the forward passes", probes.shapes, NOT_VALIDATED),
}

REWARD = {
    "path": Effect("effect_parts:constant", "the reward", talk("answers")),
    "name": Effect(
        "by_length", "which function of a module", talk("answers"), ("reward.path=effect_parts",), base="constant"
    ),
    "kwargs": Effect("{value: 0.25}", "the reward", talk("answers"), ("reward.path=effect_parts:constant",)),
    "solution_str": Effect(
        "response", "tool results count", talk("calls once"), ("reward.path=effect_parts:by_length",)
    ),
    "tool_reward_weight": Effect(
        "2.0", "a tool's reward enters", talk("calls once"), (tool("Long"), f"{RO}.response_length=400")
    ),
    "turn_score_weight": Effect(
        "2.0", "a user's score enters", talk("answers"), (user("Patient"), f"{MT}.max_user_turns=1")
    ),
    "turn_cost": Effect("0.25", "the second turn costs", talk("calls once")),
    "token_cost": Effect("0.25", "tokens cost", talk("calls once")),
    "placement": Effect(
        "turn",
        "where a tool's reward lies",
        probes.rows,
        (
            "algorithm.adv_estimator=reinforce_plus_plus",
            "reward.tool_reward_weight=1.0",
            "algorithm.gamma=0.9",
            tool("Long"),
            f"{RO}.response_length=256",
            *NOT_VALIDATED,
        ),
    ),
    "overlong_buffer.enable": Effect(
        "True",
        "long responses are penalised",
        metric("reward/mean"),
        ("reward.overlong_buffer.len=48", *NOT_VALIDATED),
        base="False",
    ),
    "overlong_buffer.len": Effect(
        "20",
        "from where on",
        metric("reward/mean"),
        ("reward.overlong_buffer.enable=True", "reward.overlong_buffer.len=48", *NOT_VALIDATED),
    ),
    "overlong_buffer.penalty_factor": Effect(
        "7.0",
        "by how much",
        metric("reward/mean"),
        ("reward.overlong_buffer.enable=True", "reward.overlong_buffer.len=48", *NOT_VALIDATED),
    ),
    "timeout_s": Effect(
        "0.05", "a slow reward is given up", talk("answers"), ("reward.path=effect_parts:slow_reward",)
    ),
}
