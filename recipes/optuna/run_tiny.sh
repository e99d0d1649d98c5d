#!/usr/bin/env bash
# Optuna searches the learning rate and the clip range of the default task.
#
#   recipes/optuna/run_tiny.sh [KEY=VALUE ...]
#   STORAGE=sqlite:///optuna.db recipes/optuna/run_tiny.sh
#
# The same command skips the trials that are finished, and resumes a broken one.
set -euo pipefail

STORAGE=${STORAGE:-null}

exec python -m verl_mt.trainer --multirun \
    hydra/sweeper=optuna \
    hydra/sweeper/sampler=tpe \
    hydra.sweeper.sampler.seed=1 \
    hydra.sweeper.sampler.n_startup_trials=4 \
    hydra.sweeper.direction=maximize \
    hydra.sweeper.n_trials=8 \
    hydra.sweeper.n_jobs=1 \
    hydra.sweeper.study_name=tiny \
    "hydra.sweeper.storage=$STORAGE" \
    hydra.sweep.dir=runs/optuna \
    +hydra.job.env_set.VERL_MT_OBJECTIVE=val/accuracy \
    "learning_rate=tag(log,interval(1e-4,1e-3))" \
    "actor_rollout_ref.actor.clip_ratio_high=interval(0.2,0.4)" \
    "$@"
