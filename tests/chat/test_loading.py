"""Loading tokenizers: one clear error for each way a folder can be wrong."""

from __future__ import annotations

import json
import shutil

import pytest
from chat_toys import CHATML, byte_tokenizer, user
from tokenizers import pre_tokenizers

from verl_mt.chat import load_chat, loading
from verl_mt.chat.loading import contradictions, load_tokenizer, read_template
from verl_mt.errors import TemplateError


@pytest.fixture
def folder(tmp_path):
    byte_tokenizer(CHATML, eos="<|im_end|>").save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_tokenizer_loads_with_its_template(folder):
    chat = load_chat(str(folder))
    assert chat.decode(chat.prompt_ids([user("q")])) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


def test_the_eos_list_of_the_generation_config_ends_turns(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert {1, 2} < load_chat(str(folder)).end_token_ids


def test_the_eos_of_the_model_config_is_used_where_there_is_no_generation_config(folder):
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    chat = load_chat(str(folder))
    assert 3 in chat.end_token_ids


def test_a_template_may_be_given_as_text_or_file(folder, tmp_path):
    text = "X" + CHATML
    file = tmp_path / "mine.jinja"
    file.write_text(text)
    for given in (text, str(file)):
        assert load_chat(str(folder), custom_chat_template=given).full_text([user("q")]).startswith("X")
    with pytest.raises(TemplateError, match=r"neither a Jinja text.*nor a file"):
        read_template("no_such_file.jinja")


def test_a_template_of_megabytes_is_refused_before_it_is_compiled(folder, tmp_path):
    file = tmp_path / "long.jinja"
    file.write_text("{{ messages[0].content }}\n" * 200_000)
    with pytest.raises(TemplateError, match=r"long.jinja' has \d{7} characters. Templates may have 500000. Shorten it"):
        load_chat(str(folder), custom_chat_template=str(file))


def test_an_error_names_the_template_it_is_in(folder):
    broken = CHATML + "\n{% if tools %}never closed"
    file = folder / "broken.jinja"
    file.write_text(broken)
    for given, name in ((str(file), rf"custom_chat_template '{file}'"), (broken, "custom_chat_template")):
        with pytest.raises(TemplateError, match=rf"^{name}, line 5: this is not valid Jinja: ") as caught:
            load_chat(str(folder), custom_chat_template=given).require(tools=False, interaction=False)
        assert "does not allow" not in str(caught.value)
    refusing = "{{ raise_exception('never') }}"
    with pytest.raises(TemplateError, match=r"^custom_chat_template cannot render the roles \[user\].*never"):
        load_chat(str(folder), custom_chat_template=refusing).with_kwargs({"a": 1}).prompt_ids([user("q")])
    (folder / "chat_template.jinja").write_text(broken)
    with pytest.raises(TemplateError, match=rf"^the chat template of '{folder}', line 5"):
        load_chat(str(folder)).prompt_ids([user("q")])


def test_template_kwargs_and_trust_reach_the_template(folder):
    chat = load_chat(str(folder), template_kwargs={"a": 1}, trust_prompts=False)
    assert (chat.template_kwargs, chat.trust_prompts) == ({"a": 1}, False)


def test_the_tokenizer_may_be_elsewhere(folder, tmp_path_factory):
    weights = tmp_path_factory.mktemp("weights")
    (weights / "generation_config.json").write_text(json.dumps({"eos_token_id": [7]}))
    assert 7 in load_chat(str(weights), tokenizer_path=str(folder)).end_token_ids


@pytest.mark.parametrize(("elsewhere", "revision"), [(None, "v1"), ("org/model", "v1"), ("org/tokenizer", None)])
def test_a_revision_belongs_to_the_model_s_own_repository(monkeypatch, elsewhere, revision):
    asked = []

    def load(path, **kwargs):
        asked.append((path, kwargs["revision"]))
        return byte_tokenizer(CHATML)

    monkeypatch.setattr(loading, "load_tokenizer", load)
    monkeypatch.setattr(loading, "_generation_eos", lambda where, revision: asked.append((where, revision)) or [])
    load_chat("org/model", revision="v1", tokenizer_path=elsewhere)
    assert asked == [(elsewhere or "org/model", revision), ("org/model", "v1")]


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(TemplateError, match="does not exist"):
        load_tokenizer(str(tmp_path / "nothing"))


def test_a_folder_without_tokenizer_is_named(tmp_path):
    with pytest.raises(TemplateError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_folder_without_chat_template_is_named(tmp_path):
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(TemplateError, match="custom_chat_template"):
        load_chat(str(tmp_path))
    assert load_chat(str(tmp_path), custom_chat_template=CHATML).generation_prompt_text


def test_a_broken_tokenizer_file_is_one_error(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TemplateError, match="no tokenizer could be loaded"):
        load_tokenizer(str(folder))


def test_a_name_that_is_no_folder_and_no_hub_name_asks_nobody(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        TemplateError, match=rf"'bas' is neither a folder \(looked at {tmp_path}/bas\) nor .*owner/name"
    ):
        load_tokenizer("bas")


def test_an_unknown_hub_name_is_one_error():
    with pytest.raises(TemplateError, match=r"no tokenizer could be loaded from 'nobody/nothing' \(revision abc\)"):
        load_tokenizer("nobody/nothing", revision="abc")


@pytest.mark.cap("P23")
def test_a_tokenizer_that_contradicts_its_file_is_seen(folder):
    tokenizer = byte_tokenizer(CHATML)
    file = folder / "tokenizer.json"
    assert contradictions(tokenizer, file) == []
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    assert any("Hello world" in text for text in contradictions(tokenizer, file))


@pytest.mark.slow
@pytest.mark.cap("P23")
def test_a_class_that_rebuilds_the_tokenizer_is_replaced_with_a_warning(shared_data, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shared_data / "tokenizers" / "phi-3-mini" / name, tmp_path / name)
    shutil.copy(
        shared_data / "tokenizers" / "phi-3-mini.original_tokenizer_config.json", tmp_path / "tokenizer_config.json"
    )
    with pytest.warns(UserWarning, match=r"gives other ids than its own tokenizer.json.*P23"):
        tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode(" Hello world", add_special_tokens=False) == [29871, 15043, 3186]


def test_the_shipped_tiny_model_has_a_name():
    from verl_mt.config_paths import resolve_model_path

    try:
        chat = load_chat("verl_mt://tiny")
    except TemplateError as error:
        if "does not exist" not in str(error):
            raise
        pytest.skip(f"not built yet: {resolve_model_path('verl_mt://tiny')}")
    chat.require(tools=True, interaction=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"), [("qwen2.5", "qwen2"), ("llama3.1", "llama-bpe"), ("phi-3-mini", "phi-3")]
)
def test_real_vocabularies_give_the_ids_of_an_independent_implementation(shared_data, name, expected):
    tokenizer = load_tokenizer(str(shared_data / "tokenizers" / name))
    texts = (
        (shared_data / "expected" / f"ggml-vocab-{expected}.gguf.inp")
        .read_text(encoding="utf-8")
        .split("\n__ggml_vocab_test__\n")
    )
    wanted = (shared_data / "expected" / f"ggml-vocab-{expected}.gguf.out").read_text(encoding="utf-8").splitlines()
    for text, line in zip(texts, wanted):
        assert tokenizer.encode(text, add_special_tokens=False) == [int(i) for i in line.split()], text


def test_how_errors_call_a_template():
    assert loading._source("m", None) == loading._source("m", "") == "the chat template of 'm'"
    assert loading._source("m", "a {{ x }}") == loading._source("m", "{% x %}") == "custom_chat_template"
    assert loading._source("m", "f.jinja") == "custom_chat_template 'f.jinja'"


def test_the_eos_ids_are_those_of_the_first_file_that_names_any(tmp_path):
    where = str(tmp_path)
    assert loading._generation_eos(where, None) == [] and loading._file_of(where, "config.json", None) is None
    for first, second, ids in (
        ({}, {"eos_token_id": 3}, [3]),
        ({"eos_token_id": None}, {"eos_token_id": [3, "4"]}, [3, 4]),
        ({"eos_token_id": 0}, {"eos_token_id": 3}, [0]),
        ({"eos_token_id": []}, {"eos_token_id": 3}, []),
        ({}, {}, []),
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(first))
        (tmp_path / "config.json").write_text(json.dumps(second))
        assert loading._generation_eos(where, None) == ids
    assert not loading.is_multimodal(where, None)
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}}))
    assert loading.is_multimodal(where, None) and loading._file_of(where, "config.json", None) == str(
        tmp_path / "config.json"
    )


def test_a_path_is_a_folder_with_a_tokenizer_or_a_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loading._check_folder("owner/name", "owner/name")
    for where in ("./x", "/x", "a/b/c", "../x/y"):
        with pytest.raises(TemplateError, match="does not exist"):
            loading._check_folder(where, where)
    (tmp_path / "owner").mkdir()
    with pytest.raises(TemplateError, match="'owner' holds no tokenizer"):
        loading._check_folder("owner", "owner")
    (tmp_path / "owner" / "vocab.txt").write_text("")
    loading._check_folder("owner", "owner")
    assert loading._what_it_is("owner") == "" and "No folder" in loading._what_it_is("owner/name")


def test_a_tokenizer_that_loses_more_than_half_of_plain_text_is_refused():
    class Loses:
        def __init__(self, num_lost):
            self.lost = [text for text in loading.PROBE_TEXTS if text.isascii()][:num_lost]

        def __len__(self):
            return 7

        def encode(self, text, add_special_tokens):
            assert not add_special_tokens
            return [] if text in self.lost else [text.upper() + " "]

        def decode(self, ids, skip_special_tokens):
            assert skip_special_tokens
            return ids[0]

    assert [text.isascii() for text in loading.PROBE_TEXTS].count(True) == 5
    for num_lost in (0, 2):
        loading._check_writes_text(Loses(num_lost), "m")
    with pytest.raises(TemplateError, match=r"\(Loses, 7 tokens\) cannot write text: 'Hello world' comes back as ''"):
        loading._check_writes_text(Loses(3), "m")
