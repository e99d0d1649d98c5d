"""`python -m verl_mt.export`: a checkpoint, sharded or not, as a plain Hugging Face folder.

    python -m verl_mt.export runs/tiny/checkpoints/step_000040 --out model/
    python -m verl_mt.export runs/tiny --out model/          # its newest checkpoint
    python -m verl_mt.export runs/cold --out model/ --dtype float32    # as exact as it was trained

Runs on one machine without Ray; the whole model must fit into its memory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from verl_mt.config.compose import compose
from verl_mt.config.schema import Config
from verl_mt.data.run_origin import require_trust
from verl_mt.errors import CheckpointError, VerlMTError


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for bad input (one line on stderr)."""
    parser = argparse.ArgumentParser(prog="python -m verl_mt.export", description=__doc__.split("\n")[0])
    parser.add_argument("source", nargs="?", metavar="RUN", help="run directory, or checkpoint folder in it")
    parser.add_argument("--checkpoint", help=argparse.SUPPRESS)  # the old form of RUN
    parser.add_argument("--out", required=True, help="folder of the exported model; an older export there is replaced")
    parser.add_argument("--config", help="config.yaml of the run; default: the run directory's, two folders up")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="of the weights; default: the run's actor_rollout_ref.model.dtype. float32 gives the exact weights of "
        "what was trained in a lower precision, for further training",
    )
    parser.add_argument("--trust", action="store_true", help="run code that another user's config.yaml names")
    args = parser.parse_args(argv)
    if (source := args.source or args.checkpoint) is None:
        parser.error("name a run directory, or a checkpoint such as runs/tiny/checkpoints/step_000040")
    try:
        config = None if args.config is None else Path(args.config)
        folder = export(Path(source), Path(args.out), config, dtype=args.dtype, trust=args.trust)
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"written to {folder}")
    return 0


def export(
    source: Path, out: Path, config_file: Path | None = None, *, dtype: str | None = None, trust: bool = False
) -> Path:
    """Write the policy of a checkpoint, with its tokenizer and the chat template it was trained with. Low-rank adapters
    are merged into the weights; `adapter/` below the folder has them as well, for peft.

    Args:
        source: a checkpoint or a run directory.
        out: the folder to write.
        config_file: the run's `config.yaml`, where it is not in its run directory.
        dtype: of the weights; None = as trained. float32: the optimizer's exact ones, where it has some.
        trust: run the code that the run's `config.yaml` names, though another user has written it.

    Raises:
        ConfigError: the run's `config.yaml` is another user's, and `trust` is off.
        CheckpointError: no checkpoint there, no config, a damaged one, one of another model, or adapters that were
            trained on weights of another dtype.
    """
    # Here, so that --help need not wait seconds for torch.
    from verl_mt.modeling.load import export_hf, load_causal_lm, source_of
    from verl_mt.modeling.lora import adapter_of, add_adapters
    from verl_mt.trainer import build, build_rollout, checkpoint
    from verl_mt.workers.sharded_checkpoint import load_weights

    folder = _checkpoint(source)
    config = _config(folder, config_file, trust=trust)
    state = checkpoint.load(folder, way_out="python -m verl_mt.export {intact} exports it")
    model = config.actor_rollout_ref.model
    if model.lora_rank and dtype not in (None, model.dtype):
        raise CheckpointError(
            f"--dtype {dtype}: the run's adapters were trained on weights in {model.dtype} and belong to these. Leave "
            "--dtype out"
        )
    module = load_causal_lm(**source_of(model) | {"dtype": dtype or model.dtype, "attn_implementation": "sdpa"})
    add_adapters(module, model, seed=config.trainer.seed)
    load_weights(module, state["workers"], folder)
    tokenizer = build.tokenizer_as_trained(build_rollout.build_chat(config))
    return export_hf(module, tokenizer, out, adapter=adapter_of(module))


def _checkpoint(source: Path) -> Path:
    from verl_mt.trainer.checkpoint import CheckpointStore

    if (source / "checkpoints").is_dir():
        newest = CheckpointStore(source / "checkpoints").latest()
        if newest is None:
            raise CheckpointError(f"{source} is a run directory without a checkpoint")
        return newest
    if not (source / "meta.json").is_file():
        raise CheckpointError(f"{source} is neither a checkpoint (no meta.json) nor a run directory (no checkpoints/)")
    return source


def _config(folder: Path, given: Path | None, *, trust: bool) -> Config:
    file = given or folder.resolve().parent.parent / "config.yaml"
    if not file.is_file():
        raise CheckpointError(f"no {file}: name the run's config.yaml with --config")
    if given is None:
        require_trust(file.parent, trust=trust)
    return compose(config_name=str(file.resolve()))


if __name__ == "__main__":
    sys.exit(main())
