"""A YAML file that puts others at places of its choice (`- actor@actor_rollout_ref.actor: dp_actor`), as verl's do."""

from __future__ import annotations

from pathlib import Path

import hydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_mt.config.groups import parsed
from verl_mt.config.hydra_source import Composition, composing, hydra_keys_in
from verl_mt.config.normalize import COMMAND_LINE, as_overrides, literal, normalize_items
from verl_mt.config.schema import leaves, whole_keys
from verl_mt.errors import ConfigError


def as_our_overrides(base: Path, name: str, choices: list[str], composition: Composition) -> list[str]:
    """The file and its config groups as overrides of the shipped base.

    Its files are written for places that only Hydra knows, so that names are changed behind Hydra and not while it
    reads; the same file may stand in two places.

    Args:
        base: the folder of the file.
        name: the file's name, without .yaml.
        choices: what the command line chooses of config groups.
        composition: gets what is wrong with the files.

    Raises:
        ConfigError: a group, or a file in it, is missing; a choice is a sweep.
    """
    for word in choices:
        if (override := parsed(word)) and override.is_sweep_override():
            raise ConfigError(
                f"{word} ({COMMAND_LINE}): {base / name}.yaml puts files at other places (@), so no group can be "
                "swept. Start a sweep for each file of the group"
            )
    try:
        with (
            composing(Composition(primary=name, extra_dirs=composition.extra_dirs, choices=choices, plain=True)),
            hydra.initialize_config_dir(config_dir=str(base), version_base="1.3"),
        ):
            tree = OmegaConf.to_container(hydra.compose(config_name=name, overrides=choices), resolve=False)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{' '.join(str(error).split())} (config {name!r} of {base})") from None
    assert isinstance(tree, dict)
    outcome = normalize_items(((str(key), value) for key, value in tree.items()), str(base / f"{name}.yaml"))
    if whole_keys({item.key for item in outcome.items}) >= leaves().keys():  # it starts from our schema
        defaults = {key: leaf.default for key, leaf in leaves().items()}
        outcome.items = [item for item in outcome.items if item.value != defaults.get(item.key, item)]
    composition.problems += outcome.problems
    composition.notes += outcome.notes
    composition.explicit |= outcome.explicit
    block = hydra_keys_in(base / f"{name}.yaml")
    ours = [f"++hydra.{key}={literal(value)}" for key, value in block.items() if key != "searchpath"]
    return ours + as_overrides(outcome.items)
