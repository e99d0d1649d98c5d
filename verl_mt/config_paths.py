"""Where the YAML files live: beside the package in a checkout, inside it in a wheel.

Paths are absolute, so the trainer works from any working directory.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path

from verl_mt.errors import ConfigError, PluginError, error_text
from verl_mt.extension_points import known

_PACKAGE = Path(__file__).resolve().parent
_IN_WHEEL = _PACKAGE / "_configs"
_GROUP = "verl_mt.config_folders"


def configs_root() -> Path:
    """The folder that holds `config/`, `tools_configs/` and `interaction_configs/`."""
    return _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parent


def config_dir() -> Path:
    """The folder of the Hydra configs (`ppo_trainer.yaml`, ...).

    Raises:
        ConfigError: neither an installed copy nor a checkout's folder exists.
    """
    folder = configs_root() / "config"
    if not folder.is_dir():
        raise ConfigError(
            f"no config folder at {folder}: install verl_mt as a wheel, in editable mode, or run it from a checkout"
        )
    return folder


@functools.cache
def group_folders() -> tuple[Path, ...]:
    """Folders with config groups: the shipped one, then those that installed packages name.

    A package names its own by an entry point of the group `verl_mt.config_folders`: `my_package = "my_package.configs"`
    for `my_package/configs/task/my_task.yaml`.

    Raises:
        ConfigError: as `config_dir`.
        PluginError: an entry point leads to no folder.
    """
    folders = [config_dir()]
    for name, path in known(_GROUP).items():
        try:
            places = getattr(find_spec(path), "submodule_search_locations", None)
        except ImportError:
            places = None
        except Exception as error:
            text = error_text(error, named=True)
            raise PluginError(f"entry point {name!r} of {_GROUP}: {path} raised {text}") from error
        if not places:
            raise PluginError(
                f"entry point {name!r} of {_GROUP}: there is no package {path!r}. Name the package whose folder holds "
                "the groups: my_package.configs for my_package/configs/task/my_task.yaml"
            )
        folders += map(Path, places)
    return tuple(folders)


def find_config_file(path: str | Path, *, key: str) -> Path:
    """Resolve a YAML file named in a config: absolute, relative to the working directory, or shipped with verl_mt.

    Args:
        path: what the user wrote.
        key: the config key it came from, for the error.

    Raises:
        ConfigError: no such file; lists the places that were tried.
    """
    given = Path(path).expanduser()
    tried = [given] if given.is_absolute() else [Path.cwd() / given, configs_root() / given]
    for candidate in tried:
        if candidate.is_file():
            return candidate.resolve()
    raise ConfigError(f"{key}: no file {str(path)!r}. Looked at {', '.join(str(t) for t in tried)}")


TINY_MODEL = "verl_mt://tiny"


def resolve_model_path(path: str) -> str:
    """What `from_pretrained` gets: `verl_mt://tiny` becomes the folder of the shipped model, anything else stays."""
    return (
        str(_PACKAGE / "tiny" / "checkpoint")
        if path == TINY_MODEL
        else str(Path(path).expanduser())
        if path.startswith("~")
        else path
    )
