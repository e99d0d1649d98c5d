"""Commands run under Hydra's own main: its command line, its output directory, sweeps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra_plugin_folder import environment
from hydra_program import SEEN

from verl_mt.config.compose import Command, compose, config_from_mapping, config_of_command, hydra_main
from verl_mt.config.schema import Config
from verl_mt.errors import ConfigError
from verl_mt.extensions.hydra_commands.jobs import JobFailedError, _claimed, ended, last_value, table
from verl_mt.extensions.hydra_commands.sweeps import _claim, job_dir, normalize_sweep
from verl_mt.extensions.hydra_commands.under_hydra import with_hidden
from verl_mt.extensions.inspection.report.sweep import SweepCollector
from verl_mt.extensions.supervised.sft import config_of

REPO = Path(__file__).resolve().parents[2]
KEY = "sk-Planted12345678secretABCDEF"
SMALL = [
    "trainer.total_training_steps=1", "trainer.val_before_train=False", "trainer.test_freq=-1",
    "data.train_batch_size=2", "data.val_max_samples=2", "actor_rollout_ref.rollout.n=2",
    "trainer.export_at_end=False", "trainer.deterministic=True",
]  # fmt: skip


@pytest.fixture
def conf(tmp_path, monkeypatch):
    """A folder of a user of Hydra: a primary file, groups, an experiment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VERL_MT_TRACEBACK", raising=False)
    files = {
        "mine": "defaults: [ppo_trainer, {algo: grpo}, _self_]\ndata: {seed: 7}\n",
        "algo/grpo": "# @package _global_\nalgorithm: {adv_estimator: grpo}\n",
        "algo/rloo": "# @package _global_\nalgorithm: {adv_estimator: rloo}\n",
        "algo/bad": "# @package _global_\nalgorithm: {adv_estimatr: rloo}\n",
        "experiment/big": "# @package _global_\ndefaults: [{override /algo: rloo}]\ndata: {val_seed: 5}\n",
        "experiment/sweep": "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {trainer.seed: '1,2'}}}\n",
        "searching": "defaults: [ppo_trainer, _self_]\nhydra: {searchpath: [more]}\n",
        "parts/seeds": "seed: 77\n",
        "packaged": "defaults: [ppo_trainer, parts@trainer: seeds, algorithm: rloo, _self_]\ndata: {seed: 8}",
        "logger/two": "# @package _global_\ntrainer: {logger: [console, tensorboard]}\n",
    }
    for name, text in files.items():
        file = tmp_path / "conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return ["-cp", "conf", "-cn", "mine"]


def run(*words: str) -> Config:
    seen: list[Config] = []
    hydra_main(seen.append, argv=words)
    (config,) = seen
    return config


def printed(capsys, *words: str) -> str:
    try:
        hydra_main(lambda config: pytest.fail("nothing runs"), argv=words)
    except SystemExit as end:  # Hydra's help
        assert end.code == 0
    return capsys.readouterr().out


def refused(capsys, *words: str, status: int = 2) -> str:
    with pytest.raises(SystemExit) as end:
        hydra_main(lambda config: pytest.fail("nothing runs"), argv=words)
    assert end.value.code == status
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ([], "data.seed", 7),
        (["algo=rloo"], "algorithm.adv_estimator", "rloo"),
        (["+experiment=big"], "algorithm.adv_estimator", "rloo"),
        (["+experiment=big"], "data.val_seed", 5),
        (["+logger=two"], "trainer.logger", ["console", "tensorboard"]),
        (["++data.seed=3"], "data.seed", 3),
        (["trainer.project_name=${oc.env:MINE}"], "trainer.project_name", "from env"),
        (["trainer.project_name=${hydra:job.config_name}"], "trainer.project_name", "mine"),
        (["+parts@trainer=seeds"], "trainer.seed", 77),
        (["+parts@trainer=seeds", "algorithm=dapo"], "data.seed", 7),
        (["-cn", "packaged"], "trainer.seed", 77),
        (["-cn", "packaged"], "data.seed", 8),
        (["-cn", "packaged"], "algorithm.adv_estimator", "rloo"),
        (["-cn", "packaged", "algorithm=gspo"], "algorithm.adv_estimator", "grpo"),
        (["-cn", "packaged", "+parts@data=seeds"], "data.seed", 77),
        (["learning_rate=0.5"], "actor_rollout_ref.actor.optim.lr", 0.5),
        (["hydra.searchpath=[more]", "+extra=on"], "data.seed", 11),
        (["-cn", "searching", "+extra=on"], "data.seed", 11),
        (["~algo"], "algorithm.adv_estimator", "grpo"),
        (["algorithm=dapo", "~algorithm"], "actor_rollout_ref.actor.clip_ratio_high", None),
    ],
    ids=str,
)
def test_overrides_and_groups_are_hydras(conf, monkeypatch, words, key, value):
    monkeypatch.setenv("MINE", "from env")
    Path("more/extra").mkdir(parents=True)
    Path("more/extra/on.yaml").write_text("# @package _global_\ndata: {seed: 11}\nlearning_rate: 0.25\n")
    config = run(*conf, *words)
    found = config
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert not HydraConfig.initialized()


@pytest.mark.slow
def test_a_job_sees_hydras_configuration_and_may_compose_again(conf):
    def task(config: Config) -> None:
        hydra = HydraConfig.get()
        assert list(hydra.overrides.task) == ["algo=rloo", "data.val_seed=2"]
        assert hydra.runtime.choices["algo"] == "rloo"
        assert compose(["data.seed=1"]).data.seed == 1
        seen.append(config)

    seen: list[Config] = []
    hydra_main(task, argv=[*conf, "data.val_seed=2", "algo=rloo"])
    assert len(seen) == 1
    assert not GlobalHydra.instance().is_initialized()


@pytest.mark.slow
def test_what_the_task_raises_comes_through(conf):
    def task(config: Config) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        hydra_main(task, argv=conf)


def test_supervised_training_takes_groups_and_hydras_run_directory(conf):
    config = config_of("rows.jsonl", [*conf, "+experiment=big", "hydra.run.dir=cold"])
    assert config is not None
    assert (config.data.seed, config.trainer.default_local_dir) == (7, str(Path("cold").absolute()))


@pytest.mark.parametrize("word", ["-m", "--multirun", "hydra.mode=MULTIRUN"])
def test_a_command_of_one_configuration_refuses_a_sweep(conf, word):
    words = [*conf, word, "trainer.seed=1,2"]
    with pytest.raises(ConfigError, match=r"verl_mt\.sft takes one configuration\. Remove --multirun"):
        config_of("rows.jsonl", words)
    with pytest.raises(ConfigError, match=r"verl_mt\.doctor takes one configuration\. Remove --multirun"):
        config_of_command(words, None, "verl_mt.doctor")


@pytest.mark.slow
def test_nothing_is_left_behind(conf, tmp_path):
    run(*conf)
    assert [path.name for path in tmp_path.iterdir()] == ["conf"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--cfg", "hydra"], ["run:\n    dir:", "launcher:"]),
        (["--cfg", "all"], ["hydra:\n", "data:\n"]),
        (["--cfg", "all", "--package", "data"], ["# @package data\n", "seed: 7\n"]),
        (["--cfg", "job", "-p", "trainer.logger"], ["# @package trainer.logger\n- console\n"]),
        (["--cfg", "hydra", "--resolve", "hydra.sweep.dir=${now:%Y}"], [f"dir: '{time.strftime('%Y')}'"]),
        (["--info", "defaults"], ["Defaults List", "algo/grpo"]),
        (["--info", "defaults-tree"], ["Defaults Tree", "algo: grpo"]),
        (["--info", "searchpath"], ["Config search path"]),
        (["--info", "plugins"], ["Installed Hydra Plugins"]),
        (["--info"], ["Config search path", "adv_estimator: grpo"]),
        (["--hydra-help"], ["hydra/launcher: basic"]),
        (["--shell-completion", "install=bash"], ["hydra_bash_completion"]),
    ],
    ids=str,
)
def test_flags_that_print(conf, capsys, words, parts):
    text = printed(capsys, *conf, *words)
    for part in parts:
        assert part in text
    assert not Path("outputs").exists()


def test_the_shell_completes_keys(conf, capsys, monkeypatch):
    monkeypatch.setenv("COMP_LINE", "trainer data.train_b")
    monkeypatch.setenv("COMP_POINT", "20")
    assert printed(capsys, "-sc", "query=bash").split() == ["data.train_batch_size="]


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--cfg=job", "--cfg=all", "--cfg=all --resolve", "--info=config"])
def test_no_secret_is_printed(conf, capsys, monkeypatch, flag):
    monkeypatch.setenv("PLANTED", KEY)
    with Path("conf/mine.yaml").open("a") as file:
        file.write(f"reward: {{kwargs: {{api_key: {KEY}, token: '${{oc.env:PLANTED}}'}}}}\n")
    text = printed(capsys, *conf, *flag.split(), "reward.path=x.py", f"reward.kwargs.password={KEY}")
    assert "Planted" not in text
    assert "password: '***'" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            ["data.seed=1,2"],
            "several values are a sweep. Give one value, or train with --multirun",
        ),
        (["--experimental-rerun", "x.pickle"], "--experimental-rerun reads a pickle"),
        (["--cfg", "job", "-p", "nothing"], "--package nothing"),
        (["-m", "data.sed=1,2"], "data.sed (command line): unknown key; did you mean data.seed?"),
        (["-m", "data.seed=1,x"], "data.seed=x (command line): Value 'x'"),
        (["-m", "learning_rate=1,2", "actor_rollout_ref.actor.optim.lr=1"], "is swept and set again"),
        (["-m", "data.seed=glob(*)"], "glob() chooses files of a config group"),
        (["-m", "data.seed=1,2", "trainer.default_local_dir=x"], "Set hydra.sweep.dir instead"),
        (["-m", "data.seed=1,2", "hydra/launcher=joblib"], "pip install hydra-joblib-launcher"),
        (["-m", "data.seed=1,2", "hydra/launcher=submitit_slurm"], "pip install hydra-submitit-launcher"),
        (["-m", "data.seed=1,2", "hydra/sweeper=optuna"], "pip install hydra-optuna-sweeper"),
        (["-m", "data.seed=1,2", "hydra/launcher=ray"], "pip install hydra-ray-launcher"),
        (["-m", "data.seed=1,2", "hydra/sweeper=ax"], "pip install hydra-ax-sweeper"),
        (["-m", "data.seed=1,2", "hydra/launcher=basc"], "It has basic. Did you mean hydra/launcher=basic?\n"),
        (["-m", "data.seed=1,2", "hydra/launcher=joblob"], "has no file joblob.yaml. It has basic\n"),
        (["-m", "reward.kwargs.api_key=sk-aaaaaaaaaaaaaaaaaaaa1,b"], "cannot be swept"),
        (["-m", "data.seed=1,2", f"+hydra.job.env_set.MY_KEY_TOKEN={KEY}"], "MY_KEY_TOKEN holds a secret"),
        (["-m", "data.seed=1,2", f"hydra.sweep.dir=https://me:{KEY}@host"], "hydra.sweep.dir holds a secret"),
        (["experiment=sweep", "trainer.default_local_dir=x"], "Set hydra.sweep.dir instead"),
        (["hydra.mode='MULTIRUN'", "trainer.default_local_dir=x"], "Set hydra.sweep.dir instead"),
        (["hydra/job_logging=nothing"], "the group hydra/job_logging has no file nothing.yaml"),
        (["algo=rlo"], "the group algo has no file rlo.yaml. It has bad, grpo, rloo. Did you mean algo=rloo?"),
        (["-m", "algo=grpo,rlo"], "algo=rlo (command line): the group algo has no file rlo.yaml"),
        (["-m", "algorithm=grpo,dappo", "data.seed=1,2"], "Did you mean algorithm=dapo?"),
        (["-m", "algorithm=grpo,dappo", "data.sed=1,2"], "2 problems"),
        (["-m", "algo=grpo,bad"], "algorithm.adv_estimatr ("),
        (["data.seed@where=3"], "data.seed@where=3 (command line): there is no config group data.seed"),
        (["hydra.nothing=1"], "hydra.nothing"),
        (["hydra.searchpath=["], "'hydra.searchpath=[' (command line) is not key=value"),
        (["algo=["], "algo=["),
        (["-m", "algo=["], "algo=["),
        (["-cn", "packaged", "algo=["], "algo=["),
        (["-cn", "packaged", "-m", "algo=grpo,rloo"], "no group can be swept"),
        (["hydra.run.dir=a", "trainer.default_local_dir=b"], "both name the run directory"),
        (["reward._target_=my.Score"], "reward.path"),
        (["+new.key=1"], "new.key (command line): unknown key"),
    ],
    ids=str,
)
def test_mistakes_are_one_clear_error(conf, capsys, words, part):
    err = refused(capsys, *conf, *words)
    assert err.startswith("error: ")
    assert part in err
    assert not Path("runs").exists()
    assert not Path("multirun").exists()


def test_mistakes_in_words_and_files_are_in_one_error(conf, capsys):
    Path("conf/algo/rloo.yaml").write_text("# @package _global_\nalgorithm: {adv_estimatr: rloo}\n")
    err = refused(capsys, *conf, "algo=rloo", "data.sed=1")
    assert "2 problems" in err
    assert "adv_estimatr" in err
    assert "data.sed " in err


@pytest.mark.slow
@pytest.mark.parametrize("words", [["hydra.run.dir=out/${hydra.job.override_dirname}", "data.seed=4"]])
def test_the_run_directory_is_hydras(conf, words):
    assert Path(str(run(*conf, *words).trainer.default_local_dir)) == Path("out/data.seed=4").absolute()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mine", "packaged"])
def test_the_run_directory_of_a_yaml_file(conf, name):
    with Path(f"conf/{name}.yaml").open("a") as file:
        file.write("\nhydra: {run: {dir: from_yaml}}\n")
    wanted = str(Path("from_yaml").absolute())
    assert run("-cp", "conf", "-cn", name).trainer.default_local_dir == wanted
    assert compose(config_name=name, config_dir="conf").trainer.default_local_dir == wanted


def test_a_sweep_with_a_secret_among_hydras_keys_of_a_file_is_refused(conf, capsys):
    with Path("conf/mine.yaml").open("a") as file:
        file.write(f"hydra: {{job: {{env_set: {{MY_TOKEN: {KEY}}}}}}}\n")
    assert "hydra.job.env_set.MY_TOKEN holds a secret" in refused(capsys, *conf, "-m", "data.seed=1,2")
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_job_changes_into_the_run_directory(conf, tmp_path):
    seen = []
    hydra_main(lambda config: seen.append((os.getcwd(), config)), argv=[*conf, "hydra.job.chdir=True"])
    ((place, config),) = seen
    assert place == config.trainer.default_local_dir == str(tmp_path / "runs" / config.trainer.experiment_name)
    assert Path.cwd() == tmp_path


@pytest.mark.slow
def test_a_resolver_of_a_plug_in(conf):
    Path("mine.py").write_text(
        "from omegaconf import OmegaConf\n"
        "OmegaConf.register_new_resolver('product', lambda a, b: a * b, replace=True)\n"
    )
    assert run(*conf, "data.seed=${product:3,4}", "external_plugins=[mine.py]").data.seed == 12


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("data.seed=1,2", "data.seed=1,2"),
        ("data.seed=choice(1,2)", "data.seed=choice(1,2)"),
        ("data.seed=range(1,4)", "data.seed=range(1,4)"),
        ("learning_rate=1e-5,1e-4", "actor_rollout_ref.actor.optim.lr=1e-05,0.0001"),
        ("learning_rate=interval(0.1,0.2)", "actor_rollout_ref.actor.optim.lr=interval(0.1,0.2)"),
        ("actor_rollout_ref.model.dtype=fp32,bf16", "actor_rollout_ref.model.dtype=choice('float32','bfloat16')"),
        ("algo=grpo,rloo", "algo=grpo,rloo"),
        ("algo=glob(*)", "algo=glob(*)"),
        ("+algorithm=dapo,gspo", "algorithm=dapo,gspo"),
        ("algorithm={adv_estimator:grpo},{adv_estimator:rloo}", "algorithm.adv_estimator=choice('grpo','rloo')"),
        ("reward.kwargs.x=1,2", "++reward.kwargs.x=1,2"),
    ],
)
def test_a_sweep_in_our_names(conf, word, line):
    plan = Command([*conf, word], None, "test").plan(normalize_sweep)
    assert plan.composition.problems == []
    (found,) = plan.lines
    assert found == line or found.replace("1e-05,0.0001", "1e-5,1e-4") == line.replace("1e-05,0.0001", "1e-5,1e-4")


def test_a_directory_with_the_jobs_of_another_sweep_is_refused(conf, tmp_path, capsys):
    _claim(tmp_path / "sweep", "mine\ndata.seed=3\ntrainer.seed")
    _claim(tmp_path / "sweep", "mine\ndata.seed=3\ntrainer.seed")
    err = refused(capsys, *conf, "-m", "trainer.seed=1,2", "data.seed=4", "hydra.sweep.dir=sweep")
    assert "has the jobs of another sweep" in err and "data.seed=3, data.seed=4" in err
    assert list((tmp_path / "sweep").iterdir()) == [tmp_path / "sweep" / ".sweep"]


def test_python_takes_one_configuration():
    with pytest.raises(ConfigError, match=r"compose\(\) takes one configuration"):
        compose(["hydra.mode=MULTIRUN"])


@pytest.mark.slow
def test_threads_compose(conf):
    def one(seed: int) -> tuple[int, str]:
        config = compose([f"data.seed={seed}", f"algo={('grpo', 'rloo')[seed % 2]}"], "mine", "conf")
        return config.data.seed, config.algorithm.adv_estimator

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(8))) == [(seed, ("grpo", "rloo")[seed % 2]) for seed in range(8)]


@pytest.mark.parametrize("word", ["hydra.run.dir=x", "hydra/launcher=basic", "~reward.kwargs.a"])
def test_a_mapping_takes_only_values(word):
    with pytest.raises(ConfigError, match="only key=value here"):
        config_from_mapping({"reward": {"kwargs": {"a": 1}}}, [word])


def test_the_folder_of_a_job_is_named_by_its_values():
    assert job_dir("actor_rollout_ref.actor.optim.lr=1e-5,trainer.seed=2") == "lr=1e-5,seed=2"
    assert job_dir("++reward.kwargs.x=1") == "x=1"
    assert job_dir("") == "job"
    first, second = (job_dir(f"data.train_files=/a/{name}.parquet") for name in ("b c", "b_c"))
    assert first != second
    assert "/" not in first + second
    assert len(job_dir("data.seed=" + "1" * 400)) < 120


def test_overrides_hide_secrets():
    words = ["data.seed=1", f"++reward.kwargs.api_key={KEY}", "algo=x", "~a"]
    assert with_hidden(words) == ["data.seed=1", "++reward.kwargs.api_key='***'", "algo=x", "~a"]


def test_the_last_value_of_a_metric(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "reward/mean": 0.5}\n{"step": 2, "reward/mean": 0.75}\n{"step": 3}\n'
    )
    assert last_value(tmp_path, "reward/mean") == 0.75
    with pytest.raises(JobFailedError, match="did you mean reward/mean"):
        last_value(tmp_path, "reward/meen")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "verl_mt.trainer", *SMALL, *words]


def killed_in_the_second_job(words: list[str], cwd: Path, env: dict[str, str]) -> Path:
    """Starts a sweep and kills it with SIGKILL when its second job has trained a step; the sweep's directory."""
    with subprocess.Popen(words, cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as sweep:
        deadline = time.monotonic() + 400
        while len(found := list(cwd.glob("runs/sweeps/*/*/metrics.jsonl"))) < 2 and time.monotonic() < deadline:
            assert sweep.poll() is None
            time.sleep(0.1)
        sweep.send_signal(signal.SIGKILL)
    return found[0].parents[1]


def statuses(sweep: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in (sweep / "jobs.jsonl").read_text().splitlines()]
    assert all(isinstance(line["objective"], float) for line in lines)
    return [(line["folder"], line["status"]) for line in lines]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("estimators", "seeds"),
    [
        pytest.param(["grpo", "rloo"], [1], marks=pytest.mark.slow, id="2 jobs"),
        pytest.param(["grpo", "rloo", "reinforce_plus_plus"], [1, 2], marks=pytest.mark.release, id="6 jobs"),
    ],
)
def test_a_sweep_that_is_killed_goes_on_and_leaves_no_secret(tmp_path, estimators, seeds):
    """The first job finishes, the sweep is killed in the second, the same command does the rest, each once."""
    (tmp_path / "score.py").write_text(
        "def compute_score(solution_str, api_key=None, **kw):\n    return len(solution_str) % 2\n"
    )
    words = command(
        "-m", f"algorithm={','.join(estimators)}", f"trainer.seed={','.join(map(str, seeds))}",
        "trainer.total_training_steps=2",
        "trainer.save_freq=1", "reward.path=score.py", "reward.name=compute_score", f"reward.kwargs.api_key={KEY}",
    )  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(REPO), "VERL_MT_OBJECTIVE": "reward/mean"}
    sweep = killed_in_the_second_job(words, tmp_path, env)
    ends = [f",seed={seed}" for seed in seeds] if len(seeds) > 1 else [""]  # a folder names what differs
    jobs = [f"algorithm={name}{end}" for name in estimators for end in ends]
    first, *rest = jobs
    assert statuses(sweep) == [(first, "finished")]

    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{len(rest)} finished, 1 skipped, 0 failed" in done.stdout
    assert sorted(path.name for path in sweep.iterdir() if path.is_dir()) == sorted(jobs)
    assert statuses(sweep) == [(first, "finished"), (first, "skipped"), *((name, "finished") for name in rest)]
    contents = SweepCollector(sweep).contents()
    assert len(contents.sweep["settings"]) == len(estimators) and contents.sweep["keys"] == ["algorithm.adv_estimator"]
    assert [(job["state"], job["same_as"]) for job in contents.sweep["jobs"]] == [("finished", None)] * len(jobs)
    for name in jobs:
        config = yaml.safe_load((sweep / name / "config.yaml").read_text())
        assert config["trainer"]["default_local_dir"] == str(sweep / name)
        hydra = yaml.safe_load((sweep / name / ".hydra" / "hydra.yaml").read_text())["hydra"]
        assert hydra["runtime"]["output_dir"] == str(sweep / name)
        files = {path.name for path in (sweep / name / ".hydra").iterdir()}
        assert files == {"config.yaml", "hydra.yaml", "overrides.yaml"}
        steps = [json.loads(line)["step"] for line in (sweep / name / "metrics.jsonl").read_text().splitlines()]
        assert steps == [1, 2]
    holders = [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert holders == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        ("hydra_joblib_launcher", ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]),
        pytest.param("hydra_submitit_launcher", ["hydra/launcher=submitit_local"], marks=pytest.mark.release),
    ],
)
def test_jobs_of_a_launcher_are_processes_of_their_own(conf, tmp_path, plugin, words):
    env = environment(plugin)
    env |= {"PYTHONPATH": f"{env['PYTHONPATH']}{os.pathsep}{Path(__file__).parent}", SEEN: str(tmp_path / "seen")}
    program = [sys.executable, "-m", "hydra_program", "-cn", "mine", "-m", "trainer.seed=1,2", *words]
    for result in ("2 finished, 0 skipped, 0 failed", "0 finished, 2 skipped, 0 failed"):
        done = subprocess.run(program, env=env, capture_output=True, text=True)
        assert result in done.stdout, done.stderr[-2000:]
    assert sorted(json.loads(line)["trainer"]["seed"] for line in (tmp_path / "seen").read_text().splitlines()) == [
        1,
        2,
    ]


@pytest.mark.slow
def test_a_file_of_a_group_sweeps_and_its_jobs_start_where_the_sweep_did(conf, tmp_path):
    env = {**os.environ, "PYTHONPATH": f"{REPO}{os.pathsep}{Path(__file__).parent}", SEEN: str(tmp_path / "seen")}
    words = ["-cn", "mine", "experiment=sweep", "hydra.job.chdir=True", "trainer.experiment_name=${hydra:runtime.cwd}"]
    words += [f"reward.kwargs.api_key={KEY}", "hydra.sweep.dir=sweep"]
    done = subprocess.run([sys.executable, "-m", "hydra_program", *words], env=env, capture_output=True, text=True)
    assert "2 finished, 0 skipped, 0 failed" in done.stdout, done.stderr[-2000:]
    seen = [json.loads(line)["trainer"] for line in (tmp_path / "seen").read_text().splitlines()]
    assert [(job["seed"], job["experiment_name"]) for job in seen] == [(1, str(tmp_path)), (2, str(tmp_path))]
    assert KEY not in (tmp_path / "sweep" / "multirun.yaml").read_text()


@pytest.mark.slow
def test_a_job_that_fails_does_not_end_the_sweep(tmp_path):
    words = command("-m", "actor_rollout_ref.actor.ppo_mini_batch_size=3,5")
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "0 finished, 0 skipped, 2 failed" in done.stdout
    (log,) = tmp_path.glob("runs/sweeps/*/ppo_mini_batch_size=5/stderr.log")
    why = log.read_text().strip()
    assert why.startswith("error: ") and "Traceback" not in done.stderr
    assert f"  failed    ppo_mini_batch_size=5  (exit status 2: {why})" in done.stdout
    sweep = log.parents[1]
    assert done.stdout.endswith(f"compare them: python -m verl_mt.report {sweep.relative_to(tmp_path)}\n")
    jobs = SweepCollector(sweep).contents().sweep["jobs"]
    assert [job["state"] for job in jobs] == ["failed", "failed"] and jobs[1]["error"] == why
    asked = subprocess.run(
        [*words, "hydra.sweeper.max_batch_size=1"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert "0 finished, 0 skipped, 1 failed" in asked.stdout


@pytest.mark.release  # a kill is also part of the sweep above, and these jobs take two minutes
def test_a_killed_job_is_named_and_the_same_command_runs_only_it(tmp_path):
    (tmp_path / "score.py").write_text(
        "import os, pathlib\n\ndef compute_score(solution_str, kill=False, **kw):\n"
        "    if kill and not pathlib.Path('go').exists():\n        os.kill(os.getpid(), 9)\n"
        "    return len(solution_str) % 2\n"
    )
    words = command("-m", "reward.kwargs.kill=False,True", "reward.path=score.py", "reward.name=compute_score")
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "1 finished, 0 skipped, 1 failed" in done.stdout, done.stderr[-2000:]
    assert "  failed    kill=True  (killed by SIGKILL: " in done.stdout
    (sweep,) = tmp_path.glob("runs/sweeps/*")
    jobs = {job["name"]: job for job in SweepCollector(sweep).contents().sweep["jobs"]}
    assert jobs["kill=False"]["state"] == "finished" and jobs["kill=True"]["state"] == "failed"
    assert jobs["kill=True"]["error"].startswith("killed by SIGKILL")
    (tmp_path / "go").touch()
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "1 finished, 1 skipped, 0 failed" in done.stdout, done.stderr[-2000:]


LAUNCHER = """
import os, subprocess, sys
from pathlib import Path
from verl_mt.extensions.hydra_commands.jobs import _claimed

with _claimed(Path(sys.argv[1])) as errors:
    job = "import time; time.sleep(1); open('ended', 'w')"
    subprocess.Popen([sys.executable, "-c", job], stderr=errors, stdout=subprocess.DEVNULL)
    os._exit(1)  # as if killed
"""


@pytest.mark.slow
def test_a_job_that_outlives_its_launcher_is_waited_for(tmp_path, capsys):
    folder = tmp_path / "seed=1"
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    subprocess.run([sys.executable, "-c", LAUNCHER, folder], cwd=tmp_path, env=env)
    with _claimed(folder) as errors:
        assert (tmp_path / "ended").exists()
        assert Path(errors.name).stat().st_size == 0
    assert [path.name for path in tmp_path.iterdir()] == ["ended"]
    assert capsys.readouterr().err == f"{folder}: another process runs this job. Waiting for it\n"


def test_the_table_of_a_sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = {"folder": "seed=1", "status": "finished", "seconds": 2.5, "ended": 10.0}
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps({**line, "ended": at}) + "\n" for at in (5.0, 10.0)))
    lines = ended(tmp_path, 7.0)
    assert table(tmp_path, lines) == (
        "sweep .: 1 finished, 0 skipped, 0 failed\n  finished  seed=1  (2.5 s)\n"
        "compare them: python -m verl_mt.report ."
    )
