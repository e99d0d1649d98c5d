"""What counts as another version, and how it is said; test_ray_versions.py asks real machines."""

from __future__ import annotations

import pytest

from verl_mt.config.rollout import RolloutConfig
from verl_mt.engines import packages_on_machines
from verl_mt.workers.ray_cluster import differences

OWN = {"Python": "3.11", "verl_mt": "0.1.0", "torch": "2.13.0+cpu", "sglang": "0.5.23"}


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
        ({"name": "sglang", "servers": ["http://host:1"]}, ()),
        ({"name": "local"}, ()),
    ],
)
def test_machines_need_sglang_where_an_engine_lives_on_them(rollout, packages):
    assert packages_on_machines(RolloutConfig(**rollout)) == packages
