"""Your own training loop from the trainer's parts, with the step's metrics and weights of `PPOTrainer`, bit for bit.

python examples/own_loop.py [KEY=VALUE ...]
"""

import sys
from contextlib import closing

from verl_mt.config.compose import compose
from verl_mt.data.batch import build_batch
from verl_mt.trainer.build import build_trainer
from verl_mt.trainer.dynamic_sampling import why_left_out


def train(*overrides: str) -> list[dict[str, float]]:
    """The metrics of each step. The weights are in `hf/` of the run directory then."""
    with closing(build_trainer(compose(["trainer.deterministic=True", *overrides]))) as parts:
        source, workers, weights, done = parts.source, parts.workers, parts.weights, []
        for step in range(source.plan.total_steps):
            source.begin(step)
            groups = source.collect(step)
            weights.release()
            batch = build_batch([t for g in groups for t in g.trajectories], pad_token_id=parts.pad_token_id)
            if batch is None:
                raise SystemExit(f"step {step + 1}: no trajectory could be trained")
            metrics = parts.measure(step, groups)
            workers.add_ref_log_probs(batch)
            metrics |= parts.estimate_advantages(batch) | workers.update(batch)
            weights.push(step + 1)
            source.draws.sampler.update(groups)
            source.ended(step + 1, why_left_out(groups, batch))
            done.append(metrics | {"weights/trainer_bytes": weights.trainer_bytes})
            print(f"step {step + 1}: reward {metrics['reward/mean']:.3f}")
        parts.export()
        return done


if __name__ == "__main__":
    train(*sys.argv[1:])
