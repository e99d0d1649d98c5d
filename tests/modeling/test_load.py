"""Loading models and exporting them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl_mt.errors import CheckpointError, ConfigError
from verl_mt.modeling.load import empty_causal_lm, export_hf, load_causal_lm


def tiny(seed=0, **changes):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(**{**sizes, "num_attention_heads": 2, "num_key_value_heads": 1, **changes}))


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_loads_back_with_the_same_weights(tmp_path, tied):
    model = tiny(tie_word_embeddings=tied)
    folder = export_hf(model, None, tmp_path / "deep" / "export")
    loaded = load_causal_lm(str(folder))
    assert not loaded.training and loaded.config._attn_implementation == "sdpa"
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), loaded.state_dict().values()))
    assert load_causal_lm(str(folder), dtype="bfloat16").dtype == torch.bfloat16
    assert load_causal_lm(str(folder), attn_implementation="eager").config._attn_implementation == "eager"


@pytest.mark.parametrize("load", [load_causal_lm, empty_causal_lm])
def test_a_process_that_loads_a_model_keeps_few_compiled_kernels_unless_told_how_many(tmp_path, monkeypatch, load):
    folder = str(export_hf(tiny(), None, tmp_path / "export"))
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    load(folder)
    assert os.environ["LRU_CACHE_CAPACITY"] == "7" and os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "128"


@pytest.mark.parametrize("tied", [True, False])
def test_an_empty_model_is_the_loaded_one_without_its_numbers(tmp_path, tied):
    folder = export_hf(tiny(tie_word_embeddings=tied), None, tmp_path / "export")
    loaded, empty = load_causal_lm(str(folder)), empty_causal_lm(str(folder))
    assert not empty.training and empty.config._attn_implementation == "sdpa"
    for kind in ("named_parameters", "named_buffers"):
        one, other = dict(getattr(loaded, kind)()), dict(getattr(empty, kind)())
        assert {n: (t.shape, t.dtype) for n, t in one.items()} == {n: (t.shape, t.dtype) for n, t in other.items()}
        assert all(tensor.device.type == "cpu" for tensor in other.values())
    assert (empty.lm_head.weight is empty.get_input_embeddings().weight) == tied
    assert empty_causal_lm(str(folder), dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_disk_that_the_tokenizer_fills_is_named_and_the_older_export_stays(tmp_path):
    """The tokenizers library raises a bare Exception."""
    rust = Tokenizer(WordLevel({"a": 0}))
    rust.add_tokens([str(n) for n in range(20_000)])

    class Full:
        def save_pretrained(self, folder):
            Path(folder, "tokenizer.json").symlink_to("/dev/full")
            rust.save(f"{folder}/tokenizer.json")

    export_hf(tiny(), None, tmp_path / "export")
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=r"cannot write .*export: the tokenizer: .*bytes free"):
        export_hf(tiny(), Full(), tmp_path / "export")
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_an_export_replaces_an_older_one_and_leaves_nothing_else_behind(tmp_path):
    export_hf(tiny(seed=0), None, tmp_path / "export")
    newer = tiny(seed=1)
    export_hf(newer, None, tmp_path / "export")
    assert torch.equal(load_causal_lm(str(tmp_path / "export")).lm_head.weight, newer.lm_head.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_a_failed_export_leaves_the_older_one_untouched(tmp_path, monkeypatch):
    older = tiny(seed=0)
    export_hf(older, None, tmp_path / "export")
    newer = tiny(seed=1)

    def half_written(folder, **kwargs):
        (folder / "config.json").write_text(json.dumps(newer.config.to_dict()))
        raise OSError("disk full")

    monkeypatch.setattr(newer, "save_pretrained", half_written)
    with pytest.raises(CheckpointError, match="disk full"):
        export_hf(newer, None, tmp_path / "export")
    assert torch.equal(load_causal_lm(str(tmp_path / "export")).lm_head.weight, older.lm_head.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_an_export_never_deletes_what_is_no_export(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="no exported model"):
        export_hf(tiny(), None, tmp_path)
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.slow
def test_a_tokenizer_is_exported_beside_the_model(tmp_path, shared_data):
    from transformers import AutoTokenizer

    sources = sorted(shared_data.rglob("tokenizer.json"), key=lambda file: file.stat().st_size)
    if not sources:
        pytest.skip("no tokenizer in the reference data")
    tokenizer = AutoTokenizer.from_pretrained(sources[0].parent)
    folder = export_hf(tiny(), tokenizer, tmp_path / "export")
    assert AutoTokenizer.from_pretrained(folder).encode("a b") == tokenizer.encode("a b")


def test_models_that_cannot_be_loaded_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"no folder .*nowhere"):
        load_causal_lm(str(tmp_path / "nowhere"))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"empty has no config\.json"):
        load_causal_lm(str(empty))
    tiny().config.save_pretrained(empty)
    with pytest.raises(ConfigError, match="no weights"):
        load_causal_lm(str(empty))
    with pytest.raises(ConfigError, match="got 'int8', expected one of float32"):
        load_causal_lm(str(empty), dtype="int8")
    with pytest.raises(ConfigError, match=r"'no-such/model' \(revision v9\) cannot be loaded"):
        load_causal_lm("no-such/model", revision="v9")


def test_a_checkpoint_that_lacks_tensors_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = export_hf(tiny(tie_word_embeddings=False), None, tmp_path / "export")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 of the model's tensors \(model\.layers\.0\.mlp\.up_proj\.weight\)"):
        load_causal_lm(str(folder))
