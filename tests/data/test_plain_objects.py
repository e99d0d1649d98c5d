"""Objects of a run as plain data: back as they were, and nothing that is read runs code."""

from __future__ import annotations

import datetime
import decimal
import hashlib
import math
import pickle
import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
from PIL import Image

from verl_mt.data.dataset import DataRow
from verl_mt.data.ledger import TrajectoryRecord
from verl_mt.data.media import MediaInput
from verl_mt.data.plain_objects import _tensor, from_plain, pack, to_plain, unpack
from verl_mt.data.trajectory import StopReason, TimeSpan, Trajectory, TrajectoryGroup
from verl_mt.errors import DataError
from verl_mt.extensions.compat.slime_sample import Sample


def there_and_back(value):
    return unpack(pack(value))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        [True] * 100,
        [1.5, 2],
        list(range(-50, 50)),
        [2**70] * 100,
        [0.1 * k for k in range(100)],
        [*range(99), 1.0],
        ("a", b"\x00\xff", 10**40, -0.0, math.inf),
        {"__kind__": "mine", "x": [1]},
        {1: "a", (2, "b"): None, None: 3},
        {"nested": [{"a": (1, [2, {"b": {}}])}]},
        {4},
        frozenset([3]),
        datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC),
        datetime.date(2026, 1, 2),
        datetime.time(1, 2),
        datetime.timedelta(days=-1, microseconds=1),
        decimal.Decimal("1.10"),
        StopReason.TIME_LIMIT,
        Sample.Status.TRUNCATED,
        TimeSpan("tool", 1.0, 2.0, 3, "search"),
        DataRow([{"role": "user", "content": "q"}], "d", 4, {"a": 1}, {"b": None}, 5, "f", "s", "l", {}, "none"),
    ],
    ids=str,
)
def test_values_come_back_as_they_were(value):
    again = there_and_back(value)
    assert again == value and type(again) is type(value)
    if isinstance(value, list):
        assert list(map(type, again)) == list(map(type, value))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "uint32", "int64", "float16", "float32", ">f8"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_arrays_and_their_scalars_keep_type_and_shape(dtype, shape):
    array = np.arange(math.prod(shape)).astype(dtype).reshape(shape).T
    again = there_and_back(array)
    assert again.dtype == np.dtype(dtype).newbyteorder("=") and again.shape == array.shape and (again == array).all()
    scalar = there_and_back(np.ones((), dtype)[()])
    assert scalar == 1 and type(scalar) is np.dtype(dtype).type


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK", "F"])
def test_images_keep_every_pixel(mode):
    image = Image.linear_gradient("L").resize((5, 4)).convert(mode)
    again = there_and_back({"images": [image]})["images"][0]
    assert again.mode == mode and again.size == (5, 4) and again.tobytes() == image.tobytes()


def test_containers_of_other_classes_become_the_plain_ones():
    again = there_and_back(OrderedDict(a=np.str_("x")))
    assert again == {"a": "x"} and type(again) is dict and type(again["a"]) is str


def group() -> TrajectoryGroup:
    record = TrajectoryRecord(messages=[{"role": "user", "content": [{"type": "image", "image": "x.png"}]}])
    record.append_given(list(range(100)), kind="prompt", turn=0)
    record.append_sampled(list(range(200)), [-0.5 * k for k in range(200)], [3] * 200, turn=1)
    record.media = [MediaInput("image", 2, 4, {"pixel_values": torch.arange(6.0).reshape(2, 3)})]
    sample = Sample(index=3, tokens=[1, 2], reward={"score": 1.0}, status=Sample.Status.COMPLETED)
    sample.mine = {"kept": True}
    made = Trajectory("t", "p", "g", "e", records=[record], stop_reason=StopReason.FINISHED, sample=sample)
    made.turn_rewards, made.ground_truth = {1: 0.5}, decimal.Decimal("3.10")
    return TrajectoryGroup("g", "p", [made], sealed=b"rows")


def test_a_group_comes_back_with_records_tensors_and_samples():
    made, again = group(), there_and_back(group())
    (old,), (new,) = made.trajectories, again.trajectories
    assert again.sealed == b"rows" and new.stop_reason is StopReason.FINISHED and new.turn_rewards == {1: 0.5}
    assert vars(new.sample) == vars(old.sample) and new.sample.mine == {"kept": True}
    tensors = new.records[0].media[0].tensors["pixel_values"]
    assert torch.equal(tensors, old.records[0].media[0].tensors["pixel_values"])
    new.records[0].media = old.records[0].media
    new.sample = old.sample
    assert again == made


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [{"b": object()}]}, r"^a\[0\]\.b is a builtins\.object"),
        (lambda: 0, r"^the value is a builtins\.function"),
        ({"x": np.array(["text"])}, r"^x is a numpy\.ndarray"),
        ({"x": np.array([object()])}, r"^x is a numpy\.ndarray"),
        ({"x": 1j}, r"^x is a builtins\.complex"),
        ({"x": Exception}, r"^x is a builtins\.type"),
    ],
)
def test_what_has_no_plain_form_is_named_with_its_place(value, message):
    with pytest.raises(DataError, match=message):
        to_plain(value)


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"__kind__": "Popen", "value": {}}, "'Popen' cannot be read: KeyError"),
        ({"__kind__": "DataRow", "value": {"prompt": []}}, "'DataRow' cannot be read: TypeError"),
        ({"__kind__": "StopReason", "value": "never"}, "'StopReason' cannot be read: ValueError"),
        ({"__kind__": "set", "value": [[1]]}, "'set' cannot be read: TypeError"),
        ({"__kind__": ["list"], "value": 1}, "cannot be read: TypeError"),
        ({"__kind__": "numpy"}, "'numpy' cannot be read: KeyError"),
    ],
)
def test_what_nobody_wrote_is_refused(plain, message):
    with pytest.raises(DataError, match=message):
        from_plain([plain])


class Evil:
    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return open, (self.file, "w")


def sealed(content: bytes) -> bytes:
    """With the right digest: an attacker computes it too."""
    return hashlib.sha256(content).digest() + content


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_reading_runs_no_code_of_whoever_wrote_it(tmp_path, protocol):
    content = pickle.dumps({"group": Evil(tmp_path / "owned")}, protocol)
    with pytest.raises(DataError, match=r"it names \w+\.open: files of a run hold plain data only"):
        unpack(sealed(content))
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["load", "save", "nn", "Tensor", "missing"])
def test_a_tensor_of_no_type_of_numbers_is_refused(name):
    content = pickle.dumps(_Named(name, (2,), b"12345678"))
    with pytest.raises(DataError, match=f"'{name}' is no type of numbers"):
        unpack(sealed(content))


class _Named:
    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return _tensor, self.arguments


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3, 4)])
def test_tensors_of_every_shape_come_back(dtype, shape):
    tensor = torch.arange(12).to(dtype)[: math.prod(shape)].reshape(shape)
    turned = tensor.movedim(0, -1) if shape else tensor
    found = there_and_back([tensor, turned])
    assert found[0].dtype == dtype and torch.equal(found[0], tensor) and torch.equal(found[1], turned)
    found[0].zero_()  # it owns its memory


def test_every_flipped_bit_is_found():
    content, draw = pack(group()), random.Random(0)
    for _ in range(400):
        place = draw.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(DataError, match="damaged"):
            unpack(bytes(flipped))


def test_a_long_list_of_numbers_is_read_as_earlier_versions_wrote_it():
    assert from_plain({"__kind__": "numbers", "value": torch.tensor([3, 4])}) == [3, 4]
    assert from_plain({"__kind__": "numbers", "value": torch.tensor([0.5], dtype=torch.float64)}) == [0.5]
