"""What a critic explains of the returns if its mini-batches hold batches of earlier steps too.

    python recipes/tiny/critic_replay.py --out runs/critic_replay   # six runs; overrides come first

The PPO of `algorithms.py`, over seeds, without and with `--earlier` rollout batches of the steps before. The returns
are rewards here (gamma and lambda are 1), so those of an earlier policy are targets that are a little out of date and
many more in number. The learning rate, the number of optimizer steps per batch (but for the first `--earlier` steps,
when there is less to mix in) and everything of the policy stay; each of the critic's passes costs more. The numbers are
means of `critic/explained_variance`, which is measured before the update and on the new batch alone.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from algorithms import ALGORITHMS, COMMON
from results import fit
from rich.console import Console
from rich.table import Table
from tensordict import TensorDict
from torch.nn.functional import pad

from verl_mt.algorithms.value_loss import explained_variance
from verl_mt.config.compose import compose
from verl_mt.data import batch as columns
from verl_mt.data.run_files import read_jsonl_tolerant
from verl_mt.trainer.build import build_trainer

_PROMPTS = 4
"""Of the new batch, per mini-batch of the critic; `algorithms.py` has as many."""
_COLUMNS = (
    columns.INPUT_IDS, columns.ATTENTION_MASK, columns.LOSS_MASK, columns.RETURNS, columns.VALUES,
    columns.PROMPT_INDEX, columns.TRAJECTORY_INDEX,
)  # fmt: skip


def joined(batches: list[TensorDict]) -> TensorDict:
    """Rows of several rollout batches as one, with prompts and trajectories of their own."""
    width = max(batch[columns.INPUT_IDS].shape[1] for batch in batches)
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in _COLUMNS}
    first = dict.fromkeys((columns.PROMPT_INDEX, columns.TRAJECTORY_INDEX), 0)
    for batch in batches:
        for name in _COLUMNS:
            column = batch[name]
            if name in first:
                rows[name].append(column + first[name])
                first[name] += int(column.max()) + 1
            else:
                rows[name].append(pad(column, (0, width - column.shape[1])))
    whole = {name: torch.cat(parts) for name, parts in rows.items()}
    return TensorDict(whole, batch_size=[len(whole[columns.INPUT_IDS])])


def train(folder: Path, earlier: int, overrides: list[str]) -> dict[str, Any]:
    """One run into `folder`; returns the held-out accuracy at its end and each step's explained variance."""
    size = f"critic.ppo_mini_batch_size={_PROMPTS * (1 + earlier)}"
    place = [f"trainer.default_local_dir={folder}", "trainer.resume_mode=disable"]
    trainer = build_trainer(compose([*overrides, size, *place]))
    critic = trainer.workers.critic
    learn, kept = critic.update, deque[TensorDict](maxlen=earlier)

    def learn_from_all(batch: TensorDict) -> dict[str, float]:
        mixed = joined([batch, *kept])
        mixed[columns.VALUES] = critic.compute_values(mixed)  # the clip is around the critic as it is now
        metrics = learn(mixed)
        # Of the new batch alone: what was learned from is no test.
        new = columns.LOSS_MASK, columns.VALUES, columns.RETURNS
        mask, values, returns = (batch[name] for name in new)
        metrics["critic/explained_variance"] = explained_variance(values, returns, mask).item()
        kept.append(batch.select(*_COLUMNS).clone())
        return metrics

    if earlier:
        critic.update = learn_from_all
    accuracy = fit(trainer)["end"]
    lines = read_jsonl_tolerant(trainer.log.run.path / "metrics.jsonl")
    explained = [line["critic/explained_variance"] for line in lines if "critic/explained_variance" in line]
    return {"accuracy": accuracy, "explained": explained}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/critic_replay"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--earlier", type=int, nargs="*", choices=(0, 1, 3), default=[0, 3])
    args, overrides = parser.parse_known_args()
    common = [
        "data.val_max_samples=500", "data.val_seed=7", "trainer.test_freq=-1", "trainer.save_freq=-1",
        "trainer.logger=[]", "trainer.rollout_rows=False", *COMMON, *ALGORITHMS["ppo"],
    ]  # fmt: skip
    table = Table("earlier batches", "seed", "last 10 steps", "last 30 steps", "accuracy")
    for earlier in args.earlier:
        means = []
        for seed in args.seeds:
            folder = args.out / f"earlier_{earlier}" / f"seed_{seed}"
            result = folder / "result.json"
            if not result.exists():
                seeds = [f"trainer.seed={seed}", f"data.seed={seed}"]
                found = train(folder, earlier, [*common, *seeds, *overrides])
                result.write_text(json.dumps(found))
            found = json.loads(result.read_text())
            seen = found["explained"]
            means.append(fmean(seen[-30:]))
            cells = (fmean(seen[-10:]), means[-1], found["accuracy"])
            table.add_row(str(earlier), str(seed), *(f"{cell:.3f}" for cell in cells))
        if len(means) > 1:
            table.add_row(str(earlier), "mean", "", f"{fmean(means):.3f}, sd {stdev(means):.3f}", "")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
