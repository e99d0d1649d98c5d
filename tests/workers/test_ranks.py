"""Who takes which row, and which GPU."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from actor_toys import hand_made
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.config.actor import ModelConfig
from verl_mt.config.schema import ActorRolloutRefConfig
from verl_mt.engines.base import Receiver
from verl_mt.errors import EngineError
from verl_mt.extensions.cluster.workers import rank_worker
from verl_mt.extensions.cluster.workers.rank_worker import Packed, RankWorker, cuda_index
from verl_mt.workers.rank_batch import RankBatch
from verl_mt.workers.setup import Placement, WorkerSetup
from verl_mt.workers.sharding import ALONE, Ranks
from verl_mt.workers.worker_group import Publication


@settings(max_examples=100, deadline=None)
@given(costs=st.lists(st.integers(1, 4000), max_size=40), size=st.integers(1, 6))
def test_every_item_has_one_owner_and_no_rank_has_much_more_than_its_share(costs, size):
    shares = Ranks(0, size).shares(costs)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    heaviest = max(sum(costs[i] for i in share) for share in shares)
    assert heaviest <= sum(costs) / size + max(costs, default=0)
    assert shares == Ranks(size - 1, size).shares(costs)


def test_the_split_balances_tokens_not_rows():
    shares = Ranks(0, 2).shares([1000, 100, 100, 100, 300, 400])
    assert shares == [[0], [1, 2, 3, 4, 5]]


def test_fewer_rows_than_ranks_leave_a_rank_empty():
    assert sorted(map(len, Ranks(0, 3).shares([5, 7]))) == [0, 1, 1]


def test_one_rank_needs_no_process_group():
    values = torch.tensor([1.0, torch.nan])
    assert ALONE.sum(values) is values
    assert ALONE.gather("x") == ["x"]


@pytest.mark.parametrize(
    ("given", "visible", "expected"),
    [
        (("3",), "3", 0),
        (("3",), "0,1,2,3", 3),
        (("3",), "3,1", 0),
        (("2",), None, 2),
        (("GPU-ab",), "GPU-cd,GPU-ab", 1),
        ((), "0,1", 0),
    ],
    ids=["its own alone", "all in sight", "renumbered", "nothing said", "by name", "none given"],
)
def test_a_rank_takes_the_gpu_that_ray_gave_it_even_where_it_sees_all(given, visible, expected):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert cuda_index(given, environment) == expected


@pytest.mark.parametrize(("where", "raises"), [("publishing", False), ("gathering", True)])
def test_what_goes_wrong_with_engines_is_told_and_what_goes_wrong_with_gathering_is_raised(where, raises):
    """Also when the last tensor has been taken: the ranks are then where they were before."""
    worker = RankWorker.__new__(RankWorker)
    worker.actor = worker.critic = None
    worker._ranks, worker._buckets = Ranks(0, 1), lambda: [{"w": torch.zeros(2)}]

    def gather(bucket, converted):
        if where == "gathering":
            raise RuntimeError("a connection closed")
        return bucket

    class WeightPublisher:
        def publish(self, tensors, version, bucket_bytes, receivers):
            assert [name for name, _ in tensors] == ["w"]
            raise EngineError("weight update: 1 of 2 weights are missing: v")

    worker._gather, worker._publisher = gather, lambda update: WeightPublisher()
    receivers = {0: [Receiver(print), Receiver(repr)]}
    if raises:
        with pytest.raises(RuntimeError, match="a connection closed"):
            worker.publish(Publication(1, "", (), 8), receivers)
    else:
        told = worker.publish(Publication(1, "", (), 8), receivers)
        assert [str(problem) for problem in told] == ["weight update: 1 of 2 weights are missing: v"] * 2


@pytest.mark.parametrize(
    ("rank", "size", "sequence", "expected"),
    [(0, 1, 1, (1, 0, True)), (3, 4, 1, (4, 3, True)), (3, 4, 2, (2, 1, False)), (2, 4, 2, (2, 1, True))],
)
def test_ranks_of_a_sequence_are_one_part_and_the_first_of_them_counts(rank, size, sequence, expected):
    ranks = Ranks(rank, size, sequence)
    assert (ranks.num_parts, ranks.part, ranks.counts) == expected


def test_equal_items_go_to_parts_in_turn():
    assert Ranks(0, 4, 2).shares([5, 5, 5, 5, 1]) == [[0, 2, 4], [1, 3]]
    assert Ranks(0, 2).shares([1, 3, 2, 2]) == [[0, 1], [2, 3]]


def test_several_ranks_ask_their_process_group(monkeypatch):
    def twice(total):
        total.mul_(2)

    def gathered(found, value):
        found[:] = [(place, value) for place in range(len(found))]

    monkeypatch.setattr(torch.distributed, "all_reduce", twice)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gathered)
    own = torch.tensor([1.0, 3.0])
    assert Ranks(1, 2).sum(own).tolist() == [2, 6] and own.tolist() == [1, 3]
    assert Ranks(1, 3).gather("x") == [(0, "x"), (1, "x"), (2, "x")]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor(7),
        torch.ones(2, requires_grad=True),
    ],
)
def test_a_tensor_travels_as_bytes(tensor):
    packed = Packed.of(tensor)
    assert packed.data.nbytes == tensor.nbytes and packed.data.ndim == 1
    found = packed.tensor()
    assert torch.equal(found, tensor) and (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    found.fill_(9)
    assert torch.equal(packed.tensor(), tensor), "in memory of its own"


class Learner:
    """An actor or a critic that notes what is asked of it."""

    def __init__(self, name: str, calls: list):
        self.name, self.calls, self.module = name, calls, torch.nn.Linear(2, 1)

    def __getattr__(self, method: str):
        def called(*args):
            self.calls.append((self.name, method, *args))
            return {
                "train": ({"loss": 1.0}, {"old": torch.ones(1)}),
                "learn": {"vf_loss": 2.0},
                "progress": {"of": self.name},
                "tensors": {self.name: torch.ones(1)},
                "first_mini_batches": [torch.tensor([0])],
            }.get(method, torch.tensor([5.0]))

        return called


def rank_of(ranks: Ranks, *, critic: bool = True, waits: bool = False):
    config = ActorRolloutRefConfig(model=ModelConfig(path="x"))
    setup = WorkerSetup(config, 1, None, "cpu", 7, Placement("ray", num_threads=3))
    worker, calls = RankWorker(setup, ranks), []
    worker.actor, worker.ref, worker.critic = (Learner(name, calls) for name in ("actor", "ref", "critic"))
    worker.critic.policy_waits = waits
    if not critic:
        worker.critic = None
    return worker, calls


BATCH = hand_made([[0, 1]])
VIEWS = pytest.mark.parametrize("ranks", [ALONE, Ranks(0, 4, 2), Ranks(1, 4, 2), Ranks(2, 4, 2)], ids=str)


def names(calls):
    return [call[:2] for call in calls]


def only_for(answers: bool, value):
    return value if answers else None


@VIEWS
@pytest.mark.parametrize("critic", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_an_update_of_a_rank(ranks, critic, waits):
    worker, calls = rank_of(ranks, critic=critic, waits=waits)
    metrics, filled = worker.update(RankBatch.alone(BATCH))
    both, learns = ["actor", "critic"] if critic else ["actor"], waits and critic
    expected = [(who, "onload") for who in both] + [("critic", "learn")] * critic + [("actor", "train")] * (not learns)
    assert names(calls) == expected
    assert all(call[2].ranks == ranks for call in calls if call[1] in ("learn", "train"))
    told = ({"vf_loss": 2.0} if critic else {}) | ({} if learns else {"loss": 1.0})
    assert metrics == only_for(ranks.rank == 0, told)
    assert filled == only_for(ranks.counts, {} if learns else {"old": torch.ones(1)})


@VIEWS
def test_what_a_rank_computes_of_its_rows(ranks):
    worker, calls = rank_of(ranks)
    share = RankBatch.alone(BATCH)
    told = [worker.values(share), worker.log_probs(share), worker.ref_log_probs(share)]
    assert told == [only_for(ranks.counts, torch.tensor([5.0]))] * 3
    assert names(calls) == [
        ("actor", "onload"), ("critic", "onload"), ("critic", "values"),
        ("actor", "onload"), ("actor", "log_probs"),
        ("actor", "onload"), ("ref", "log_probs"),
    ]  # fmt: skip
    assert all(call[2].ranks == ranks for call in calls if len(call) > 2)
    assert worker.first_mini_batches(torch.zeros(1)) == only_for(ranks.rank == 0, [torch.tensor([0])])


@VIEWS
@pytest.mark.parametrize("critic", [True, False])
def test_the_state_of_a_rank(ranks, critic, monkeypatch, tmp_path):
    worker, calls = rank_of(ranks, critic=critic)
    saved, loaded = [], []

    def save(tensors, folder, name="actor"):
        saved.append(([*tensors], folder, name))
        return {name: "digest"}

    monkeypatch.setattr(rank_worker, "save_shards", save)
    monkeypatch.setattr(rank_worker, "load_workers_state", lambda *args: loaded.append(args))
    both = ["actor", "critic"] if critic else ["actor"]
    assert worker.progress() == only_for(ranks.rank == 0, {who: {"of": who} for who in both})
    calls.clear()
    assert worker.save_shards(tmp_path) == dict.fromkeys(both, "digest")
    assert saved == [([who], tmp_path, who) for who in both]
    assert names(calls) == [(who, "onload") for who in both] + [(who, "tensors") for who in both]
    calls.clear()
    worker.load({"x": 1}, tmp_path)
    assert loaded == [(worker.actor, worker.critic, {"x": 1}, tmp_path)]
    worker.offload()
    assert names(calls) == [(who, what) for what in ("onload", "offload") for who in both]


def test_weights_are_gathered_in_buckets_of_whole_layers(monkeypatch):
    """A layer of 40 bytes is a bucket of its own where a bucket takes 32."""
    layers = [
        {"a": torch.zeros(4)},
        {"b": torch.zeros(1), "c": torch.zeros(2, dtype=torch.bfloat16)},
        {"d": torch.zeros(2)},
    ]
    layers += [{"e": torch.zeros(10)}, {"f": torch.zeros(1)}]
    monkeypatch.setattr(rank_worker, "all_weights", lambda module: module)
    monkeypatch.setattr(rank_worker, "by_layer", lambda weights: layers)
    monkeypatch.setattr(rank_worker, "_BUCKET_BYTES", 32)
    for ranks in (ALONE, Ranks(1, 2)):
        worker, _ = rank_of(ranks)
        assert [[*bucket] for bucket in worker._buckets()] == [["a", "b", "c", "d"], ["e"], ["f"]]
        assert worker.num_buckets() == only_for(ranks.rank == 0, 3)
    monkeypatch.setattr(rank_worker, "_BUCKET_BYTES", 31)
    assert [[*bucket] for bucket in worker._buckets()] == [["a", "b", "c"], ["d"], ["e"], ["f"]]
    assert worker._buckets()[0]["a"] is layers[0]["a"]


@pytest.mark.parametrize("adapters", [True, False])
def test_gathered_weights_are_merged_or_converted_where_somebody_wants_them(monkeypatch, adapters):
    worker, calls = rank_of(ALONE)
    seen, lora = [], object()
    monkeypatch.setattr(rank_worker, "whole", lambda tensor: seen.append(tensor) or tensor + 1)
    monkeypatch.setattr(rank_worker, "as_in_checkpoint", lambda model, found: {"converted": (model, found)})
    monkeypatch.setattr(rank_worker, "lora_of", lambda model: lora if adapters else None)
    monkeypatch.setattr(rank_worker, "merged", lambda found, tensors: {"merged": (found, tensors)})
    whole = {"w": torch.ones(1)}
    assert worker._gather({"w": torch.zeros(1)}, None) == {} and len(seen) == 1, "gathering is collective"
    assert worker._gather({"w": torch.zeros(1)}, True) == {"converted": (worker.actor.module, whole)}
    found = worker._gather({"w": torch.zeros(1)}, False)
    assert found == ({"merged": (lora, whole)} if adapters else whole)
    assert not calls


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bucket_is_for_who_asks_rank_0(rank):
    worker, calls = rank_of(Ranks(rank, 2))
    asked = []
    worker._buckets = lambda: ["first", "second"]
    worker._gather = lambda bucket, converted: asked.append((bucket, converted)) or {"w": torch.tensor([3.0])}
    found = worker.bucket(1, False)
    assert asked == [("second", False if rank == 0 else None)] and names(calls) == [("actor", "onload")]
    assert found is None if rank else found["w"].tensor().tolist() == [3.0]


@pytest.mark.parametrize("receives", [True, False])
def test_every_rank_gathers_all_weights_and_gives_them_to_its_own_engines(monkeypatch, receives):
    worker, calls = rank_of(Ranks(1, 2))
    # The engine takes its cache back next.
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(("memory", "given back")))
    gathered, given_to = [], []
    worker._buckets = lambda: [{"a": 1}, {"b": 2}]
    worker._gather = lambda bucket, converted: gathered.append((*bucket, converted)) or bucket

    class WeightPublisher:
        def publish(self, tensors, version, bucket_bytes, receivers):
            given_to.append((next(iter(tensors)), version, bucket_bytes, receivers))
            return ["told"]

    worker._publisher = lambda update: WeightPublisher()
    receivers = {0: [Receiver(print)], 1: [Receiver(repr)]} if receives else {0: [Receiver(print)]}
    told = worker.publish(Publication(5, "", (), 8), receivers)
    assert gathered == [("a", receives or None), ("b", receives or None)]
    assert told == (["told"] if receives else [])
    assert given_to == ([(("a", 1), 5, 8, receivers[1])] if receives else [])
    told_of = [("actor", "onload"), ("actor", "offload"), ("critic", "offload"), ("memory", "given back")]
    assert names(calls) == told_of


@pytest.mark.parametrize("rank", [0, 1])
def test_adapters_are_those_of_the_policy(monkeypatch, rank):
    worker, calls = rank_of(Ranks(rank, 2))
    monkeypatch.setattr(rank_worker, "is_adapter", lambda name: name == "bias")
    monkeypatch.setattr(rank_worker, "lora_of", lambda model: None)
    assert worker.adapter() is None and not calls
    monkeypatch.setattr(rank_worker, "lora_of", lambda model: "lora")
    found = worker.adapter()
    assert names(calls) == [("actor", "onload")]
    if rank:
        assert found is None
    else:
        assert found[0] == "lora" and [*found[1]] == ["bias"]
        assert torch.equal(found[1]["bias"].tensor(), worker.actor.module.bias)


@pytest.mark.parametrize(("device", "size"), [("cpu", 1), ("cpu", 2), ("cuda", 1), ("cuda", 2)])
def test_a_rank_joins_the_others_and_loads_its_models(monkeypatch, device, size):
    done = {}
    monkeypatch.setattr(rank_worker, "prepare_torch", lambda **options: done.update(torch=options))
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: done.update(gpu=index))
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda backend, **options: done.update(group=(backend, options))
    )
    monkeypatch.setattr(rank_worker, "load_workers", lambda *args: done.update(loaded=args) or loaded)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    worker, _ = rank_of(Ranks(size - 1, size))
    loaded = worker.actor, None, None
    worker._setup = replace(worker._setup, device=device)
    worker.gpus = lambda: ("6",)
    worker.actor.module.bias.requires_grad_(False)
    assert worker.start("tcp://there:1", 8.0) == (3, 2)
    expected = {"torch": {"threads": 3, "seed": 7, "deterministic": False}, "loaded": (worker._setup, worker._ranks)}
    if device == "cuda":
        expected["gpu"] = 1
    if size > 1:
        group = {"init_method": "tcp://there:1", "rank": 1, "world_size": 2, "timeout": timedelta(seconds=8)}
        expected["group"] = ("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", group)
    assert done == expected and (worker.ref, worker.critic) == (None, None)


def test_what_ray_tells_of_a_rank(monkeypatch):
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": [3, "x"]})
    ray = SimpleNamespace(
        util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.9"), get_runtime_context=lambda: context
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    worker, _ = rank_of(ALONE)
    host, _, port = worker.address().rpartition(":")
    assert host == "tcp://10.0.0.9" and 0 < int(port) < 65536
    assert worker.gpus() == ("3", "x")
    context.get_accelerator_ids = dict
    assert worker.gpus() == ()
    assert worker.describe() == (os.getpid(), socket.gethostname())


def test_publishers_are_kept_until_their_groups_are_left(monkeypatch):
    ray = SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.9"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    worker, _ = rank_of(ALONE)
    worker.stop_giving()  # there are none yet
    asked = []
    worker._publishers = SimpleNamespace(get=lambda *args: asked.append(args), close=lambda: asked.append("closed"))
    worker._publisher(Publication(1, "collections.OrderedDict", ("float32",), 8))
    worker.stop_giving()
    (kind, *rest), closed = asked
    assert kind.__name__ == "OrderedDict" and rest == [("float32",), "10.0.0.9"] and closed == "closed"


def test_publishing_memory_back_empties_the_allocators_cache(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    rank_of(ALONE)[0].give_back_memory()
    assert calls == [1]


@pytest.mark.parametrize(
    ("given", "visible", "expected"),
    [(("7",), " 5 , 6", 0), (("6",), "5, 6 ,", 1), (("GPU-x",), "", 0), (("x",), " ,", 0)],
)
def test_names_of_gpus_that_are_not_in_sight_mean_the_first(given, visible, expected):
    assert cuda_index(given, {"CUDA_VISIBLE_DEVICES": visible}) == expected
