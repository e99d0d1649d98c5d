"""Checkpoints of earlier versions, whose state was a pickle."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from verl_mt import convert_checkpoint
from verl_mt.data.dataset import DataRow
from verl_mt.data.digests import save_tensors
from verl_mt.data.drawn_prompts import OpenPrompt
from verl_mt.errors import CheckpointError
from verl_mt.trainer import checkpoint
from verl_mt.trainer.checkpoint import CheckpointStore

ROW = DataRow([{"role": "user", "content": "q"}], "d", 4, raw={"a": [1]}, index=7, file="f.jsonl", source="s")


def earlier(folder: Path, step: int, version: int = 3, **more) -> Path:
    """As versions up to 0.1 wrote them."""
    path = folder / f"step_{step:06d}"
    (path / "actor").mkdir(parents=True)
    (path / "actor" / "__0_0.distcp").write_bytes(b"shard")
    opened = [{"number": 3, "prompt_id": "s000003.00001", "row": pickle.dumps(ROW)}]
    state = {
        "step": step,
        "workers": {"actor": {"tensors": {"w": torch.arange(3)}}},
        "random": {**checkpoint.random_state(), "numpy": np.random.get_state()},
        "prompts": {"drawn": 5, "trained": 4, "left_out": 0, "open": opened},
        **more,
    }
    shard = f"{hashlib.sha256(b'shard').hexdigest()} 5"
    with (path / "state.pt").open("wb") as file:
        files = {"actor/__0_0.distcp": shard, "state.pt": save_tensors(state, file)}
    meta = {"schema_version": version, "step": step, "score": 0.5} | ({} if version == 2 else {"files": files})
    signed = meta if version == 2 else meta | {"sha256": checkpoint._digest_of(meta)}
    (path / "meta.json").write_text(json.dumps(signed))
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_an_earlier_checkpoint_is_refused_with_the_command_that_converts_it(tmp_path, version, capsys):
    path = earlier(tmp_path / "checkpoints", 3, version)
    command = f"python -m verl_mt.convert_checkpoint {path}"
    with pytest.raises(CheckpointError, match=f"earlier version.*can run code.*{command}"):
        checkpoint.load(path)
    numbers = np.random.random(2)
    np.random.seed(0)
    assert convert_checkpoint.main(command.split()[3:]) == 0
    assert capsys.readouterr().out == f"{path}: converted\n"
    state = checkpoint.load(path)
    assert state["workers"]["actor"]["tensors"]["w"].tolist() == [0, 1, 2] and state["step"] == 3
    assert OpenPrompt.of(state["prompts"]["open"][0]) == OpenPrompt(3, "s000003.00001", ROW)
    checkpoint.set_random_state(state["random"])
    assert (np.random.random(2) == numbers).all()
    assert (path / "actor" / "__0_0.distcp").read_bytes() == b"shard" and CheckpointStore(path.parent).best() == path
    assert [p.name for p in path.parent.iterdir()] == ["step_000003"]
    assert convert_checkpoint.main([str(path)]) == 0 and "in the format of this version" in capsys.readouterr().out


def test_all_checkpoints_of_a_run_are_converted(tmp_path, capsys):
    for step in (1, 2):
        earlier(tmp_path / "checkpoints", step)
    assert convert_checkpoint.main([str(tmp_path)]) == 0
    assert [checkpoint.load(p)["step"] for p in CheckpointStore(tmp_path / "checkpoints").all()] == [1, 2]


def test_a_damaged_or_missing_one_is_one_line_and_stays(tmp_path, capsys):
    path = earlier(tmp_path, 1)
    content = (path / "state.pt").read_bytes()
    (path / "state.pt").write_bytes(content[:-1])
    assert convert_checkpoint.main([str(path)]) == 2
    assert "state.pt is damaged" in capsys.readouterr().err and (path / "state.pt").read_bytes() == content[:-1]
    assert convert_checkpoint.main([str(tmp_path / "none")]) == 2
    assert "is not a checkpoint" in capsys.readouterr().err


def test_a_state_that_has_no_plain_form_is_named_and_stays(tmp_path, capsys):
    path = earlier(tmp_path, 1, mine={"x": Path("file")})
    assert convert_checkpoint.main([str(path)]) == 2
    assert "mine.x is a pathlib." in capsys.readouterr().err
    assert checkpoint.read_meta(path)["schema_version"] == 3
