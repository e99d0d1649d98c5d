"""What is refused of a Ray cluster, and how it is said: room that it has not, versions that are others.

The machines are made up here; test_ray_group.py and test_ray_versions.py ask real ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verl_mt.config.rollout import RolloutConfig
from verl_mt.config.schema import ActorRolloutRefConfig
from verl_mt.errors import ConfigError
from verl_mt.extensions.cluster.workers import ray_cluster
from verl_mt.extensions.cluster.workers.ray_cluster import differences, packages_on_machines, require_room, usable
from verl_mt.workers.setup import Placement, WorkerSetup

OWN = {"Python": "3.11", "verl_mt": "0.1.0", "torch": "2.13.0+cpu", "sglang": "0.5.23"}


@pytest.mark.parametrize(
    ("variables", "note", "address"),
    [
        ({}, None, ("local", False)),
        ({"RAY_ADDRESS": ""}, None, ("local", False)),
        ({"RAY_ADDRESS": "auto"}, None, ("local", False)),
        ({}, "10.0.0.1:6379", ("10.0.0.1:6379", False)),
        ({"RAY_ADDRESS": "auto"}, "10.0.0.1:6379", ("10.0.0.1:6379", False)),
        ({"RAY_ADDRESS": "local"}, "10.0.0.1:6379", ("local", True)),
        ({"RAY_ADDRESS": "10.0.0.2:1"}, "10.0.0.1:6379", ("10.0.0.2:1", True)),
    ],
)
def test_only_a_cluster_that_is_named_or_was_started_by_ray_start_is_joined(
    variables, note, address, tmp_path, monkeypatch
):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    if note:
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(note)
    assert ray_cluster.cluster_address(variables) == address


@pytest.mark.parametrize(
    ("gpus", "clusters", "variables", "warned"),
    [
        (8, {"a:1", "a:2"}, {}, True),
        (8, {"a:1"}, {}, False),
        (4, {"a:1", "a:2"}, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, False),
        (0, {"a:1", "a:2"}, {}, False),
    ],
)
def test_two_clusters_that_hand_out_the_same_gpus_are_told(gpus, clusters, variables, warned, caplog):
    ray_cluster.warn_of_shared_gpus(gpus, clusters, variables)
    assert ("set CUDA_VISIBLE_DEVICES to different GPUs" in caplog.text) is warned


def test_the_same_versions_differ_in_nothing_whatever_torch_was_built_for():
    assert differences(OWN, [("a", OWN), ("b", OWN | {"torch": "2.13.0+cu130"})]) == []


def test_each_other_version_is_one_text_with_its_machines_and_this_machine_s_own():
    told = [("a", OWN | {"torch": "2.11.0"}), ("b", OWN | {"torch": "2.11.0", "sglang": None}), ("c", OWN)]
    told += [("d", OWN | {"torch": "2.14.1", "Python": "3.12"})]
    assert differences(OWN, told) == [
        "Python 3.12 on d, Python 3.11 here",
        "no sglang on b, sglang 0.5.23 here",
        "torch 2.11.0 on a, b, torch 2.13.0+cpu here",
        "torch 2.14.1 on d, torch 2.13.0+cpu here",
    ]


def test_of_many_machines_some_are_named_and_all_are_counted():
    told = [(f"node{k}", {"verl_mt": "9.9"}) for k in range(64)]
    assert differences(OWN, told) == ["verl_mt 9.9 on node0, node1, node2, node3 and 60 more, verl_mt 0.1.0 here"]


def test_what_is_installed_there_and_not_here_differs():
    assert differences({"verl_mt": None}, [("a", {"verl_mt": "0.1.0"})]) == ["verl_mt 0.1.0 on a, no verl_mt here"]


@pytest.mark.parametrize(
    ("rollout", "packages"),
    [
        ({"name": "sglang"}, ("sglang",)),
        ({"name": "sglang", "nnodes": 1}, ("sglang",)),
        ({"name": "sglang", "launch_servers": 2}, ("sglang",)),
        ({"name": "sglang", "servers": ["http://host:1"]}, ()),
        ({"name": "local"}, ()),
    ],
)
def test_machines_need_sglang_where_an_engine_lives_on_them(rollout, packages):
    assert packages_on_machines(RolloutConfig(**rollout)) == packages


@pytest.fixture
def machines(monkeypatch):
    """Sets the (CPUs, GPUs) of the cluster's machines."""

    def have(*sizes: tuple[int, int]) -> None:
        nodes = [
            {
                "Alive": True,
                "NodeID": str(k),
                "Resources": {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {}),
            }
            for k, (cpus, gpus) in enumerate(sizes)
        ]
        monkeypatch.setattr(ray_cluster.ray, "nodes", lambda: nodes)

    return have


def wanted(device="cuda", nnodes=1, per_node=4) -> WorkerSetup:
    config = ActorRolloutRefConfig(rollout=RolloutConfig(name="sglang"))
    placement = Placement("ray", nnodes=nnodes, n_workers_per_node=per_node)
    return WorkerSetup(config, total_steps=1, train_batch_size=1, device=device, seed=0, placement=placement)


def apart(nnodes: int, engines: tuple[int, int]) -> WorkerSetup:
    config = ActorRolloutRefConfig(
        rollout=RolloutConfig(name="sglang", nnodes=engines[0], n_workers_per_node=engines[1])
    )
    return replace(wanted(nnodes=nnodes), config=config)


def test_gpus_that_no_machine_of_the_cluster_has_are_refused_with_what_to_do(machines):
    machines((8, 0), (8, 0))
    with pytest.raises(ConfigError, match=r"trainer\.device=cuda, but no machine .*8 CPUs, 0 GPUs.*--num-gpus=N"):
        require_room(wanted())
    require_room(wanted("cpu"))


@pytest.mark.parametrize(
    ("sizes", "nnodes", "engines"),
    [
        ([(16, 8)], 1, (1, 4)),  # one machine for both
        ([(16, 4), (16, 4)], 1, (1, 4)),  # one each
        ([(16, 8), (16, 8)], 2, (2, 4)),
        ([(16, 4), (16, 4), (16, 2), (16, 2)], 2, (2, 2)),
        ([(16, 8), (16, 4)], 2, (1, 4)),  # the large one for both, the small one for training
    ],
)
def test_engines_with_devices_of_their_own_are_taken_where_there_is_room_beside_training(
    machines, sizes, nnodes, engines
):
    machines(*sizes)
    require_room(apart(nnodes, engines))


@pytest.mark.parametrize(
    ("sizes", "nnodes", "engines"),
    [
        ([(16, 4)], 1, (1, 4)),  # all of it is training's
        ([(6, 8)], 1, (1, 4)),  # GPUs enough, CPUs not
        ([(16, 4), (16, 4)], 2, (1, 2)),
        ([(16, 8), (16, 2)], 1, (2, 4)),  # a second machine that is too small
        ([(16, 8), (16, 4)], 2, (2, 4)),
    ],
)
def test_more_engines_than_devices_beside_training_are_refused_before_anything_loads(machines, sizes, nnodes, engines):
    machines(*sizes)
    with pytest.raises(
        ConfigError, match=rf"rollout\.nnodes={engines[0]} .* beside the {nnodes} with 4 CPUs and 4 GPUs"
    ):
        require_room(apart(nnodes, engines))


def test_launched_engines_are_separate_ones_of_one_machine(machines):
    rollout = RolloutConfig(name="sglang", launch_servers=2, tensor_model_parallel_size=2)
    setup = replace(wanted(), config=ActorRolloutRefConfig(rollout=rollout))
    machines((16, 8))
    require_room(setup)
    machines((16, 6))
    with pytest.raises(ConfigError, match=r"need 1 machine.s. with 4 CPUs and 4 GPUs each, beside the 1 with"):
        require_room(setup)


def test_machines_that_only_an_engine_fits_on_are_asked_too(machines):
    machines((16, 4), (2, 2), (1, 0))
    assert [node["NodeID"] for node in usable(apart(1, (1, 2)))] == ["0", "1"]
    assert [node["NodeID"] for node in usable(wanted())] == ["0"]
