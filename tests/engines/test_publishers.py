"""What gives weights in a process is kept from update to update."""

from __future__ import annotations

import pytest

from verl_mt.engines.base import Publishers, WeightPublisher
from verl_mt.errors import EngineError


class Noting(WeightPublisher):
    def __init__(self, *arguments, address):
        self.made_with, self.closed = (arguments, address), 0

    def publish(self, tensors, version, bucket_bytes, receivers):
        return []

    def close(self):
        self.closed += 1


class Other(Noting):
    pass


def test_a_giver_is_kept_as_long_as_it_would_be_made_with_the_same():
    publishers = Publishers()
    first = publishers.get(Noting, ("float32",), "10.0.0.1")
    assert publishers.get(Noting, ("float32",), "10.0.0.1") is first
    beside = publishers.get(Other, ("float32",), "10.0.0.1")
    assert beside is not first and publishers.get(Noting, ("float32",), "10.0.0.1") is first


@pytest.mark.parametrize("arguments, address", [(("bfloat16",), "10.0.0.1"), (("float32",), "10.0.0.2")])
def test_one_that_would_be_made_with_others_takes_its_place_and_the_old_one_is_closed_first(arguments, address):
    publishers = Publishers()
    first = publishers.get(Noting, ("float32",), "10.0.0.1")
    second = publishers.get(Noting, arguments, address)
    assert second.made_with == (arguments, address) and (first.closed, second.closed) == (1, 0)
    publishers.close()
    assert (first.closed, second.closed) == (1, 1)


@pytest.mark.parametrize("kind", [dict, "my.Publisher", print])
def test_what_is_no_giver_is_refused_by_name(kind):
    with pytest.raises(EngineError, match=r"is no subclass of verl_mt\.engines\.base\.WeightPublisher"):
        Publishers().get(kind, (), "127.0.0.1")
