"""DAPO's parts: `algorithm.filter_groups` and `reward.overlong_buffer`."""

from __future__ import annotations

from dataclasses import dataclass

from verl_mt.config.knob import Section, knob


@dataclass
class FilterGroupsConfig(Section):
    """`algorithm.filter_groups`."""

    enable: bool = knob(
        False, "Replace groups whose members all did equally well by those of further prompts (dynamic sampling)."
    )
    metric: str = knob(
        "seq_final_reward",
        "What must differ within a group: seq_final_reward (the reward), or a number of the reward function's dict, "
        "such as acc or score.",
    )
    max_num_gen_batches: int = knob(
        10, "Rollouts per step; then the step trains on the groups that it has. 0 or less = until the batch is full."
    )


@dataclass
class OverlongBufferConfig(Section):
    """`reward.overlong_buffer`."""

    enable: bool = knob(False, "Penalise responses that come near `actor_rollout_ref.rollout.response_length`.")
    len: int = knob(128, "Tokens before the limit on which the penalty grows.", min=1)
    penalty_factor: float = knob(1.0, "Largest penalty, at the limit; in the metrics as reward/overlong.", min=0)
