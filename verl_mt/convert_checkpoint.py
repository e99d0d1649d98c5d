"""`python -m verl_mt.convert_checkpoint PATH`: checkpoints of earlier versions in today's format.

Earlier versions wrote `state.pt` as a pickle, and a pickle can run code when it is read. Convert only checkpoints that
you trust. PATH is a checkpoint or a run directory, all of whose checkpoints are converted in place.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from verl_mt.errors import CheckpointError, VerlMTError, error_text
from verl_mt.reading import require_file


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for bad input (one line on stderr)."""
    parser = argparse.ArgumentParser(prog="python -m verl_mt.convert_checkpoint", description=__doc__.split("\n")[0])
    parser.add_argument("path", help="checkpoint (.../checkpoints/step_000040) or run directory that you trust")
    path = Path(parser.parse_args(argv).path)
    try:
        from verl_mt.trainer.checkpoint import CheckpointStore

        folders = CheckpointStore(path / "checkpoints").all() if (path / "checkpoints").is_dir() else [path]
        for folder in folders:
            print(f"{folder}: {'converted' if convert(folder) else 'is in the format of this version'}")
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def convert(folder: Path) -> bool:
    """Rewrite a checkpoint in the format of this version. False: it was in it. It executes the pickles inside.

    Raises:
        CheckpointError: not a checkpoint, damaged, or its state cannot be written as plain data.
    """
    import pickle

    import torch  # takes seconds

    from verl_mt.trainer.checkpoint import PICKLED, CheckpointStore, find_damage, read_meta

    meta = read_meta(folder)
    if meta["schema_version"] not in PICKLED:
        return False
    if (damage := find_damage(folder)) is not None:
        raise CheckpointError(damage)
    try:
        require_file(folder / "state.pt")
        state: dict[str, Any] = torch.load(folder / "state.pt", map_location="cpu", weights_only=False)
        opened = state.get("prompts", {}).get("open", [])
        rows = [pickle.loads(prompt["row"]) for prompt in opened]
    except Exception as error:  # a damaged file shows as anything
        raise CheckpointError(f"{folder / 'state.pt'} cannot be read: {error_text(error)}") from error
    for prompt, row in zip(opened, rows):
        prompt["row"] = row

    def keep_the_rest(new: Path) -> dict[str, str]:
        """Shards: links, the bytes stay where they are."""
        for file in sorted(p for p in folder.rglob("*") if p.is_file() and p.parent != folder):
            copy = new / file.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            os.link(file, copy)
        return {name: digest for name, digest in meta.get("files", {}).items() if name != "state.pt"}

    CheckpointStore(folder.parent).save(meta["step"], state, score=meta["score"], write_more=keep_the_rest)
    return True


if __name__ == "__main__":
    sys.exit(main())
