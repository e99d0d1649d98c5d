"""Which key a short name means: one rule for Python's keywords and for "did you mean".

A short name is the last part of a key, with any of the parts above it in their order: `lr`, `actor.lr`, `optim.lr`. If
several keys match, the policy and the training come first: keys of `_GIVE_WAY` count only where nothing else matches.
A name that still means several keys is ambiguous.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping

from verl_mt.config.extended import keys_of_packages
from verl_mt.config.schema import leaves, open_parent, sections
from verl_mt.plugins import optional_function

_ROLLOUT = "actor_rollout_ref.rollout"
_GIVE_WAY = (
    "critic.", f"{_ROLLOUT}.val_kwargs.", f"{_ROLLOUT}.dtype", f"{_ROLLOUT}.placement", f"{_ROLLOUT}.nnodes",
    f"{_ROLLOUT}.n_workers_per_node", f"{_ROLLOUT}.environment.", "reward.placement", "data.seed",
    "actor_rollout_ref.actor.shuffle",
)  # fmt: skip
"""Beginnings of keys that a short name does not mean where another key matches. So do the keys of other packages."""
_EVERY_KEY = "python -m verl_mt.config.write_reference lists all keys"


def keys_meant(name: str) -> list[str]:
    """The keys that a name means: one, several if it is ambiguous, none if it is no name of a key.

    Args:
        name: dotted; a key, a short name, or either with a name below a free mapping (`policy_loss.loss_mode`).
    """
    if name in leaves() or name in sections() or open_parent(name) is not None:
        return [name]
    found = [key for key in (*leaves(), *sections()) if _ends(key, name)]
    parts = () if found else name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        head, rest = ".".join(parts[:end]), ".".join(parts[end:])
        found = found or [f"{key}.{rest}" for key, leaf in leaves().items() if leaf.is_open and _ends(key, head)]
    return [key for key in found if not key.startswith(_GIVE_WAY) and key not in keys_of_packages()] or found


def _ends(key: str, name: str) -> bool:
    """Whether they have the last part in common, and the other parts of `name` stand above it in the same order."""
    *above, last = key.split(".")
    *wanted, wanted_last = name.split(".")
    left = iter(above)
    return last == wanted_last and all(part in left for part in wanted)


def other_names() -> Mapping[str, str]:
    """Names that an extension reads as keys -> the key that each sets; empty where it sets none."""
    names = optional_function("other_names")
    return names() if names else {}


def suggest_key(name: str) -> str:
    """`"; did you mean x?"` for a name that is no key: what it means as a short name, else what is closest to it."""
    parent, _, last = name.rpartition(".")
    names = [*leaves(), *(alias for alias, key in other_names().items() if key)]
    neighbours = {n.rpartition(".")[2]: n for n in names if n.rpartition(".")[0] == parent}
    ends = {key.rpartition(".")[2] for key in leaves()}
    close = functools.partial(difflib.get_close_matches, n=1)
    found = keys_meant(name)
    for match in () if found else close(last, neighbours if parent else [*ends, *neighbours], cutoff=0.7):
        found = [neighbours[match]] if parent or match not in ends else keys_meant(match)
    found = found or close(name, [key for key in leaves() if key.rpartition(".")[2] == last], cutoff=0.75)
    found = found or keys_meant(last) or close(name, names, cutoff=0.9)
    found = found or [key for match in close(last, ends, cutoff=0.75) for key in keys_meant(match)]
    return f"; did you mean {' or '.join(found)}?" if found else f"; {_EVERY_KEY}"
