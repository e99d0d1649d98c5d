"""The default task on each real engine, in each placement that a few processes of one machine can have.

    python benchmarks/engines.py [--engines sglang vllm] [--ways nodes servers workers ...] [--steps 10] [key=value ...]

`nodes`: two Ray nodes, a rank on each with an engine beside it. `servers`: a server that is started as the engine's
page says, and named in `rollout.servers`. `workers`: two rollout workers ask the engine beside the trainer. `launched`:
an engine on separate devices, without Ray. Each is one run of `python -m verl_mt.trainer` in its process, and one
row: accuracy on the held-out problems behind the last step, the largest difference between log-probs of engine and
trainer, bytes of weights that passed the trainer's process, restarts of engines and of rollout workers, and seconds. A
run that fails is a row with its last line, and the exit status is 1.

Run it with a Python that has SGLang and Ray, and name vLLM's by `--vllm-python`; no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from provenance import REPO, add_out, write_rows

ENGINES, WAYS = ("sglang", "vllm"), ("nodes", "servers", "workers", "launched")
NODE = {"num_cpus": 2, "object_store_memory": 200 * 1024 * 1024}
ROLLOUT = "actor_rollout_ref.rollout."
_START_S, _RUN_S = 600.0, 3600.0
_SAME_VERSION = "staleness/age_0/logprob_diff"


def run_one(engine: str, way: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run, as a row."""
    run = folder / f"{engine}-{way}"
    words = [f"{ROLLOUT}name={engine}", f"{ROLLOUT}engine_timeout_s={_START_S}", f"trainer.default_local_dir={run}"]
    words += [f"trainer.total_training_steps={args.steps}", f"trainer.test_freq={args.steps}", "trainer.num_threads=1"]
    words += ["trainer.device=cpu", "trainer.save_freq=-1", "trainer.export_at_end=False", "trainer.logger=[console]"]
    if engine == "vllm" and way != "servers":
        words.append(f"{ROLLOUT}python={args.vllm_python}")
    begin = time.monotonic()
    try:
        with PLACED[way](engine, args, folder) as (placed, environment):
            command = [sys.executable, "-W", "ignore", "-m", "verl_mt.trainer", *words, *placed, *args.overrides]
            with (folder / f"{engine}-{way}.log").open("wb") as log:
                done = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=_RUN_S, check=False)
        failed = f"exit status {done.returncode}" if done.returncode else ""
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        failed = str(error)
    row: dict[str, Any] = {"engine": engine, "way": way, "seconds": round(time.monotonic() - begin)}
    if failed:
        return row | {"failed": failed, "said": last_line(folder / f"{engine}-{way}.log")}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/step_s" in line]
    same = [line.get(_SAME_VERSION, line["rollout/logprob_diff_max"]) for line in steps]
    return row | {
        "steps": len(steps),
        "accuracy": next(line["val/accuracy"] for line in reversed(lines) if "val/accuracy" in line),
        "log-prob difference": max(same),
        "trainer_bytes": max(line["weights/trainer_bytes"] for line in steps),
        "engine restarts": steps[-1].get("engine/restarts", 0),
        "worker restarts": steps[-1].get("rollout/worker_restarts", 0),
    }


def last_line(log: Path) -> str:
    """What a run said last."""
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "")[:300]


def without_cluster() -> dict[str, str]:
    """Variables of a run that knows of no cluster, and finds this checkout."""
    path = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1"}


Placed = Iterator[tuple[list[str], dict[str, str]]]


@contextlib.contextmanager
def two_nodes(engine: str, args: argparse.Namespace, folder: Path) -> Placed:
    """Words and variables of a run on a cluster of two nodes."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        cluster.add_node(**NODE)
        cluster.wait_for_nodes()
        words = ["trainer.placement=ray", "trainer.nnodes=2", "trainer.n_workers_per_node=1"]
        yield words, without_cluster() | {"RAY_ADDRESS": cluster.address}
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextlib.contextmanager
def a_server(engine: str, args: argparse.Namespace, folder: Path) -> Placed:
    """Words and variables of a run that is told of a server."""
    from verl_mt.config.compose import compose
    from verl_mt.config_paths import resolve_model_path
    from verl_mt.extensions.cluster.sglang.processes import reserve_port
    from verl_mt.extensions.cluster.vllm.client import environment_of

    config = compose(args.overrides)
    length = config.data.max_prompt_length + config.actor_rollout_ref.rollout.response_length
    model, reserved = resolve_model_path(config.actor_rollout_ref.model.path), reserve_port()
    port = str(reserved.getsockname()[1])
    if engine == "sglang":
        variables = without_cluster()
        command = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--model-path", model, "--port", port]
        command += ["--context-length", str(length + 8), "--device", "cpu", "--attention-backend", "torch_native"]
        command += ["--dtype", "float32", "--max-total-tokens", "65536", "--sleep-on-idle", "--log-level", "warning"]
    else:
        variables = environment_of(args.vllm_python, eager=True)
        variables |= {"PYTHONPATH": str(REPO), "VLLM_SERVER_DEV_MODE": "1"}
        command = [args.vllm_python, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        command += ["--host", "127.0.0.1", "--port", port, "--dtype", "float32", "--max-model-len", str(length)]
        command += ["--logprobs-mode", "processed_logprobs", "--enable-scale-out", "--enable-prompt-tokens-details"]
        command += ["--enforce-eager", "--block-size", "32", "--no-enable-chunked-prefill"]
        command += ["--max-num-batched-tokens", "4096", "--worker-extension-cls"]
        command += ["verl_mt.extensions.cluster.vllm.process.ServerWorker"]
    url, log = f"http://127.0.0.1:{port}", folder / f"{engine}-server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(command, env=variables, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + _START_S
        while not serves(url):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the {engine} server does not serve: {last_line(log)}")
            time.sleep(0.5)
        yield [f"{ROLLOUT}servers=[{url}]"], without_cluster()
    finally:
        reserved.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def serves(url: str) -> bool:
    """Whether a server answers."""
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def two_workers(engine: str, args: argparse.Namespace, folder: Path) -> Placed:
    """Words and variables of a run with rollout workers."""
    yield [f"{ROLLOUT}num_workers=2"], without_cluster()


@contextlib.contextmanager
def launched(engine: str, args: argparse.Namespace, folder: Path) -> Placed:
    """Words and variables of a run that launches a separate engine."""
    yield [f"{ROLLOUT}launch_servers=1"], without_cluster()


PLACED = {"nodes": two_nodes, "servers": a_server, "workers": two_workers, "launched": launched}


def as_table(rows: list[dict[str, Any]]) -> str:
    """For benchmarks/RESULTS.md."""
    head = ["engine", "way", "steps", "accuracy", "log-prob difference", "trainer_bytes", "engine restarts"]
    head += ["worker restarts", "seconds"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [row.get(name, row.get("failed", "")) for name in head]
        lines.append("| " + " | ".join(f"{c:.3g}" if isinstance(c, float) else f"{c}" for c in cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--vllm-python", default=os.environ.get("VERL_MT_VLLM_PYTHON"), help="a Python that has vLLM")
    parser.add_argument("--run", type=Path, help="keep the runs' files in this folder")
    add_out(parser)
    args, args.overrides = parser.parse_known_args()
    if wrong := [word for word in args.overrides if "=" not in word or word.startswith("-")]:
        parser.error(f"unknown words: {' '.join(wrong)}. Overrides are key=value")
    if "vllm" in args.engines and not args.vllm_python:
        parser.error("vllm needs --vllm-python PATH, or VERL_MT_VLLM_PYTHON in the environment (docs/vllm.md)")
    rows = []
    with tempfile.TemporaryDirectory(prefix="engines_") as scratch:
        folder = (args.run or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for engine in args.engines:
            for way in args.ways:
                rows.append(run_one(engine, way, args, folder))
                print(json.dumps(rows[-1]), flush=True)
    write_rows(args.out, rows)
    good = [row for row in rows if "failed" not in row]
    worst = max((row["log-prob difference"] for row in good), default=0.0)
    restarts = sum(row["engine restarts"] + row["worker restarts"] for row in good)
    print(as_table(rows))
    print(f"engines: {len(good)} of {len(rows)} runs finished, log-probs within {worst:.1e}, {restarts:.0f} restarts")
    return 0 if len(good) == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
