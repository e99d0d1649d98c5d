"""Every key of the configuration: another value for it, and what is different then.

An entry says where the key matters (`context`), what to set it to, and which probe sees the difference. A key without
an entry fails `test_key_effects.py`: add one, in the file of its kind, when you add an option.
"""

from __future__ import annotations

import effect_parts as parts
from effect_kinds import AC, MO, MT, RO, Effect
from effect_probes import talk
from effects_of_rollouts import MULTI_TURN, ROLLOUT
from effects_of_rows import DATA, MODEL, REWARD
from effects_of_runs import TRAINER
from effects_of_training import ACTOR, ALGORITHM, CRITIC, REF

EFFECTS: dict[str, Effect] = {
    **{f"data.{name}": effect for name, effect in DATA.items()},
    **{f"{MO}.{name}": effect for name, effect in MODEL.items()},
    **{f"{AC}.{name}": effect for name, effect in ACTOR.items()},
    **{f"{RO}.{name}": effect for name, effect in ROLLOUT.items()},
    **{f"{MT}.{name}": effect for name, effect in MULTI_TURN.items()},
    **{f"actor_rollout_ref.ref.{name}": effect for name, effect in REF.items()},
    **{f"critic.{name}": effect for name, effect in CRITIC.items()},
    **{f"reward.{name}": effect for name, effect in REWARD.items()},
    **{f"algorithm.{name}": effect for name, effect in ALGORITHM.items()},
    **{f"trainer.{name}": effect for name, effect in TRAINER.items()},
    "external_plugins": Effect(lambda: f"[{parts.plugin_file()}]", "the file is run", talk("answers")),
}
