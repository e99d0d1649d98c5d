"""The Slurm script: what it starts, where and in which order, with `srun` and `scontrol` replaced."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray_machines
from warm_python import warm_python

from verl_mt import engines
from verl_mt.config.checks import check
from verl_mt.config.compose import hydra_main
from verl_mt.config.schema import Config
from verl_mt.extensions.inspection.doctor.findings import Subject
from verl_mt.extensions.inspection.doctor.resources import num_engines

pytestmark = pytest.mark.slow  # commands, servers, many configurations

SCRIPT = Path(__file__).resolve().parents[2] / "recipes" / "slurm" / "train.sbatch"

SRUN = """
import json, os, signal, sys, time
nodes = next(w.removeprefix("--nodelist=") for w in sys.argv if w.startswith("--nodelist="))
options = [w for w in sys.argv[1:] if w.startswith("--")]
command = sys.argv[1 + next(i for i, w in enumerate(sys.argv[1:]) if not w.startswith("--")):]
folder = os.environ["LOG_FOLDER"]
tokens = [os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS")]
def write(what):
    with open(f"{folder}/log", "a") as log:
        log.write(json.dumps([what, nodes, command, tokens, options]) + "\\n")
def ended(*_):
    write("ended")
    sys.exit(143 if command[:2] == ["python", "-m"] else 0)
def wait():
    for _ in range(3000):  # Python does not notice a signal that comes just before one long sleep begins
        time.sleep(0.02)
signal.signal(signal.SIGTERM, ended)
write("begun")
if command[0] == "hostname":  # as on Debian, whose /etc/hosts has the machine's own name at 127.0.1.1
    print(os.environ.get("OWN", "172.17.0.1 10.0.0.7 fe80::1") if command[1] == "-I" else "127.0.1.1")
elif command[:2] == ["getent", "ahostsv4"]:
    own = "127.0.1.1" if command[2] in nodes else os.environ.get("RESOLVED", "10.0.0.7")
    print("".join(f"{own:15} {kind}\\n" for kind in ("STREAM", "DGRAM")))
elif command[:2] == ["ray", "start"]:
    open(f"{folder}/up-{nodes}", "w").close()
    wait()
elif command[:2] == ["ray", "status"]:
    sys.exit(0 if os.path.exists(f"{folder}/up-n01") else 1)
elif command[:2] == ["python", "-c"]:
    compile(command[2], "snippet", "exec")
    print("something that a library says")
    print(1 + 2 * (os.path.exists(f"{folder}/up-n02,n03") and "ALONE" not in os.environ))
elif os.environ.get("TRAINER_WAITS"):
    wait()
else:
    sys.exit(int(os.environ.get("TRAINER_CODE", "0")))
"""


SCONTROL = """#!/bin/sh
case "$*" in
  "show hostnames n[01-03]") printf "n01\\nn02\\nn03\\n" ;;
  "show hostnames n01") echo n01 ;;
  *) exit 1 ;;
esac
"""

Start = Callable[..., subprocess.Popen[str]]


def job_in(folder: Path) -> Start:
    """Starts the script as Slurm would, on three machines; environment variables can be changed."""
    stubs = folder / "bin"
    stubs.mkdir()
    (stubs / "srun").write_text(f"#!{sys.executable} -IS\n{SRUN}")
    (stubs / "scontrol").write_text(SCONTROL)
    (stubs / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.05\n")
    for stub in stubs.iterdir():
        stub.chmod(0o755)

    def start(*words: str, **changes: str) -> subprocess.Popen[str]:
        slurm = {"SLURM_JOB_NODELIST": "n[01-03]", "SLURM_JOB_ID": "12345", "SLURM_GPUS_ON_NODE": "8"}
        environment = {"PATH": f"{stubs}:{os.environ['PATH']}", "LOG_FOLDER": str(folder), **slurm, **changes}
        command = ["bash", str(SCRIPT), *words]
        return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    return start


@pytest.fixture
def job(tmp_path) -> Start:
    return job_in(tmp_path)


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    """The folder of a job that went well; what it said is in `out`."""
    folder = tmp_path_factory.mktemp("ran")
    process = job_in(folder)("trainer.n_workers_per_node=4", "trainer.seed=3", SLURM_CPUS_ON_NODE="96")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    (folder / "out").write_text(out)
    return folder


def log_of(tmp_path: Path) -> list[tuple[str, str, list[str], list[str], list[str]]]:
    file = tmp_path / "log"
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def commands(tmp_path: Path, what: str) -> list[tuple[str, str]]:
    """(machines, first words) of each step that `begun` or `ended`, repetitions of a question left out."""
    found = [
        (nodes, " ".join(c[:3] if c[0] != "python" else c[:2])) for w, nodes, c, *_ in log_of(tmp_path) if w == what
    ]
    return [step for k, step in enumerate(found) if k == 0 or step != found[k - 1]]


def test_the_head_comes_first_then_the_others_then_the_trainer_and_all_are_ended(ran):
    begun = commands(ran, "begun")
    asked = [step for step in begun if step[1] in ("ray status --address", "python -c")]
    assert [step for step in begun if step not in asked] == [
        ("n01", "hostname -I"),
        ("n03", "getent ahostsv4 n01"),
        ("n01", "ray start --head"),
        ("n02,n03", "ray start --block"),
        ("n01", "python -m"),
    ]
    assert ("n01", "ray status --address") in begun[: begun.index(("n02,n03", "ray start --block"))]
    assert begun.index(("n01", "python -c")) < begun.index(("n01", "python -m")) == len(begun) - 1
    assert sorted(commands(ran, "ended")) == [("n01", "ray start --head"), ("n02,n03", "ray start --block")]
    assert "n01 (10.0.0.7:22345), 3 machine(s), 8 worker(s) and 8 GPU(s)" in (ran / "out").read_text()
    steps = {" ".join(command[:3]): command for what, _, command, *_ in log_of(ran)}
    assert {"--node-ip-address=10.0.0.7", "--port=22345"} < set(steps["ray start --head"])
    assert "--address=10.0.0.7:22345" in steps["ray start --block"]
    for name in ("ray start --head", "ray start --block"):
        assert steps[name][steps[name].index("--num-gpus") + 1] == "8"


def test_the_trainer_gets_the_job_s_size_and_what_was_given_counts(ran):
    *_, (_, _, command, *_) = [entry for entry in log_of(ran) if entry[2][:2] == ["python", "-m"]]
    assert command[:3] == ["python", "-m", "verl_mt.trainer"]
    configs = []
    hydra_main(configs.append, argv=command[3:])
    trainer = configs[0].trainer
    assert (trainer.placement, trainer.nnodes, trainer.n_workers_per_node, trainer.seed) == ("ray", 3, 4, 3)


def test_every_step_knows_the_address_and_a_token_of_this_job(ran):
    known = [tuple(tokens) for _, _, command, tokens, _ in log_of(ran) if command[0] not in ("hostname", "getent")]
    assert len(set(known)) == 1 and known[0][0] == "token" and known[0][2] == "10.0.0.7:22345"
    assert len(known[0][1]) > 20


def test_every_step_has_all_cores_and_shares_them_and_one_task_per_machine(ran):
    for _, nodes, _, _, options in log_of(ran):
        assert {"--overlap", "--cpus-per-task=96", "--ntasks-per-node=1"} < set(options)
        assert {f"--nodes={nodes.count(',') + 1}", f"--ntasks={nodes.count(',') + 1}"} < set(options)


@pytest.mark.parametrize(
    ("found", "address"),
    [
        ({"RESOLVED": "127.0.1.1", "OWN": "10.0.0.9 172.17.0.1"}, "10.0.0.9"),  # the others know it by no address
        ({"RESOLVED": "203.0.113.5", "OWN": "10.0.0.9"}, "10.0.0.9"),  # by one that is not on the machine itself
        ({"SLURM_JOB_NODELIST": "n01", "OWN": "10.0.0.9"}, "10.0.0.9"),  # there are no others
        ({"HEAD_ADDRESS": "10.1.1.1"}, "10.1.1.1"),
    ],
)
def test_the_head_s_address_is_one_that_it_has_and_others_can_reach(job, tmp_path, found, address):
    process = job(**found)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert f"n01 ({address}:22345)" in out
    (start,) = [command for what, _, command, *_ in log_of(tmp_path) if (what, command[2:3]) == ("begun", ["--head"])]
    assert f"--node-ip-address={address}" in start


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"OWN": "fe80::1"}, "n01 has no IPv4 address that other machines reach (it has: fe80::1); name one: "),
        ({"OWN": ""}, "n01 has no IPv4 address that other machines reach (it has: none); name one: "),
        ({"HEAD_ADDRESS": "127.0.1.1"}, "127.0.1.1 is an address that a machine has for itself; name one that "),
    ],
)
def test_an_address_that_nobody_else_reaches_ends_the_job_with_one_line(job, tmp_path, found, said):
    process = job(**found)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1 and said in err and err.count("\n") == 1 and "HEAD_ADDRESS=" in err
    assert not [step for step in commands(tmp_path, "begun") if step[1].startswith("ray start")]


def test_the_documented_command_samples_on_every_gpu_with_engines_that_ray_places(job, tmp_path):
    page = (SCRIPT.parents[2] / "docs" / "scaling.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("sbatch ")]
    assert line.removeprefix("sbatch ").split(" --config-path")[0] in SCRIPT.read_text()
    given = [word for word in line.split() if word.startswith("actor_rollout_ref.")]
    process = job(*given)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    (words,) = [command[3:] for what, _, command, *_ in log_of(tmp_path) if command[:2] == ["python", "-m"]]
    configs: list[Config] = []
    hydra_main(configs.append, argv=words)
    config = configs[0]
    check(config)
    assert engines.lives_beside_ranks(config.actor_rollout_ref.rollout.name)
    assert num_engines(Subject(config)) == 3 * 8


def test_the_job_ends_as_the_trainer_ended(job, tmp_path):
    process = job(TRAINER_CODE="2")
    process.communicate(timeout=300)
    assert process.returncode == 2 and len(commands(tmp_path, "ended")) == 2


def test_before_its_time_is_over_the_trainer_is_told_and_waited_for(job, tmp_path):
    process = job(TRAINER_WAITS="1")
    while ("n01", "python -m") not in commands(tmp_path, "begun"):
        assert process.poll() is None, "the job ended before its trainer began"
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    ended = commands(tmp_path, "ended")
    assert ended[0] == ("n01", "python -m") and len(ended) == 3
    assert process.returncode == 143  # of the trainer, which ended by itself


def test_machines_that_do_not_join_end_the_job_with_their_number(job, tmp_path):
    process = job(START_TIMEOUT="2", SLURM_JOB_NODELIST="n[01-03]", ALONE="1")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1 and "1 of 3 machines joined after 2 s" in err
    assert ("n01", "python -m") not in commands(tmp_path, "begun")
    assert len(commands(tmp_path, "ended")) == 2


@pytest.mark.ray
@pytest.mark.slow
def test_a_real_ray_head_and_a_real_trainer_on_one_machine(job, tmp_path):
    """`srun` runs what it is given, here."""
    srun = tmp_path / "bin" / "srun"
    srun.write_text('#!/usr/bin/env bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n')
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\nhostname\n")
    (tmp_path / "bin" / "sleep").unlink()
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    environment = ray_machines.environment()
    (tmp_path / "warm").mkdir()
    warm = warm_python(tmp_path / "warm")["PATH"]
    environment |= {"PATH": f"{tmp_path / 'bin'}:{warm}:{Path(sys.executable).parent}"}
    process = job(
        "data.val_max_samples=4",
        "data.train_batch_size=2",
        "data.train_max_samples=16",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=1",
        "trainer.device=cpu",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        **environment | {"SLURM_GPUS_ON_NODE": "0", "WORKERS_PER_NODE": "1", "RAY_PORT": str(port)},
    )
    out, err = process.communicate()
    assert process.returncode == 0, (out[-2000:], err[-2000:])
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert 1 in steps
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the head was left running"
