"""Load a tokenizer and its chat template, and find out at once if it would give other ids than its own files say."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_mt.chat.template import ChatTemplate
from verl_mt.config_paths import resolve_model_path
from verl_mt.errors import TemplateError
from verl_mt.plugins import extension_function

PROBE_TEXTS = (
    "Hello world",
    " Hello world",
    "  two  spaces\n\n\tand a tab",
    "don't 12345 3.14 x=[1,2]",
    "Ünïcödé 你好 \U0001f642",
    '{"name": "f", "arguments": {"q": "a b"}}\n',
)
"""Texts on which a rebuilt pre-tokenizer betrays itself."""


def load_tokenizer(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a local folder, a hub name, or `verl_mt://tiny`.

    `AutoTokenizer` of transformers 5 rebuilds the pre-tokenizer of some classes and ignores `tokenizer.json`; then
    the plain fast tokenizer is used instead, with a warning.

    Raises:
        TemplateError: no such folder, no tokenizer in it, one whose ids do not spell the text that they were made of,
            or one that contradicts its `tokenizer.json`.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    where = resolve_model_path(str(path))
    _check_folder(where, str(path))
    version: dict[str, Any] = {"revision": revision} if revision else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code, **version)
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError) as error:
        raise TemplateError(
            f"no tokenizer could be loaded from {str(path)!r}"
            f"{f' (revision {revision})' if revision else ''}: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:500].rstrip('.')}. {_what_it_is(where)}Give a folder with tokenizer.json "
            "and tokenizer_config.json, or a hub name that is reachable or in the cache"
        ) from error
    _check_writes_text(tokenizer, str(path))
    file = _tokenizer_file(where, revision)
    if file is None:
        return tokenizer
    found = contradictions(tokenizer, file)
    if not found:
        return tokenizer
    plain = PreTrainedTokenizerFast.from_pretrained(where, **version)
    name = type(tokenizer).__name__
    if contradictions(plain, file):
        raise TemplateError(
            f"the tokenizer of {str(path)!r} ({name}) gives other ids than its own tokenizer.json: {found[0]}. "
            "Repair the folder (tokenizer_class: PreTrainedTokenizerFast in tokenizer_config.json is the usual fix)",
            cause="P23",
        )
    warnings.warn(
        f"AutoTokenizer made a {name} of {str(path)!r} that gives other ids than its own tokenizer.json ({found[0]}); "
        "PreTrainedTokenizerFast is used instead. Set tokenizer_class: PreTrainedTokenizerFast in "
        "tokenizer_config.json, so that every program that serves this model does the same. [P23]",
        stacklevel=2,
    )
    return plain


def _check_writes_text(tokenizer: Any, path: str) -> None:
    """Refuse a tokenizer that loses most plain text: from a folder without `tokenizer.json` transformers may make one
    with an empty vocabulary, and a run would train on nothing. Case and white space may change, and an alphabet may
    lack some characters."""
    ascii_texts = [text for text in PROBE_TEXTS if text.isascii()]
    came_back = {}
    for text in ascii_texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        came_back[text] = str(tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""
    lost = [text for text, got in came_back.items() if _bare(got) != _bare(text)]
    if 2 * len(lost) > len(ascii_texts):
        raise TemplateError(
            f"the tokenizer of {path!r} ({type(tokenizer).__name__}, {len(tokenizer)} tokens) cannot write text: "
            f"{lost[0]!r} comes back as {came_back[lost[0]]!r}. Files of its vocabulary (tokenizer.json, or vocab and "
            "merges) are missing or damaged: copy them from the model's repository, or name another folder in "
            "actor_rollout_ref.model.tokenizer_path",
            cause="P23",
        )


def _bare(text: str) -> str:
    return "".join(text.lower().split())


def contradictions(tokenizer: Any, tokenizer_file: str | Path) -> list[str]:
    """Probe texts whose ids differ between a loaded tokenizer and the `tokenizer.json` it came from."""
    from tokenizers import Tokenizer

    truth = Tokenizer.from_file(str(tokenizer_file))
    truth.no_padding()
    truth.no_truncation()
    found = []
    for text in PROBE_TEXTS:
        got = list(tokenizer.encode(text, add_special_tokens=False))
        wanted = truth.encode(text, add_special_tokens=False).ids
        if got != wanted:
            found.append(f"{text!r} -> {got[:8]} instead of {wanted[:8]}")
    return found


def load_chat(
    path: str,
    *,
    revision: str | None = None,
    tokenizer_path: str | None = None,
    custom_chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    trust_prompts: bool = True,
    trust_remote_code: bool = False,
) -> ChatTemplate:
    """The chat template of a model: tokenizer, Jinja text, and the ids at which it stops; and the image processor of a
    multimodal model (`ProcessorChat`).

    Args:
        path: the model's folder or hub name.
        revision: of the hub repository `path`; the tokenizer of another repository comes in its newest version.
        tokenizer_path: where the tokenizer is, if not beside the model.
        custom_chat_template: a Jinja text, or the path of a file with one.
        template_kwargs: variables of the template.
        trust_prompts: see `ChatTemplate`.
        trust_remote_code: run Python code of the model's repository.

    Raises:
        TemplateError: folder, tokenizer or template missing or unusable.
        ConfigError: a vision model without Pillow, or without an image processor.
    """
    where = tokenizer_path or path
    tokenizer = load_tokenizer(where, revision=revision if where == path else None, trust_remote_code=trust_remote_code)
    folder = resolve_model_path(str(path))
    keys: dict[str, Any] = {
        "chat_template": read_template(custom_chat_template) if custom_chat_template else None,
        "source": _source(where, custom_chat_template),
        "template_kwargs": template_kwargs,
        "trust_prompts": trust_prompts,
        "extra_end_ids": _generation_eos(folder, revision),
    }
    if is_multimodal(folder, revision):
        load = extension_function("media_processor")  # torch and image processors: not for text
        media = load(folder, revision=revision, trust_remote_code=trust_remote_code)
        if media is not None:
            chat: ChatTemplate = extension_function("media_chat")(tokenizer, media=media, **keys)
            return chat
    return ChatTemplate(tokenizer, **keys)


def _source(where: str, custom: str | None) -> str:
    """How errors call the template."""
    if not custom:
        return f"the chat template of {where!r}"
    return "custom_chat_template" if _is_jinja(custom) else f"custom_chat_template {custom!r}"


def _is_jinja(text_or_file: str) -> bool:
    return "{{" in text_or_file or "{%" in text_or_file


def read_template(text_or_file: str) -> str:
    """A Jinja text as it is, or the content of the file that is named.

    Raises:
        TemplateError: it looks like a file name but there is no such file.
    """
    if _is_jinja(text_or_file):
        return text_or_file
    file = Path(text_or_file).expanduser()
    if not file.is_file():
        raise TemplateError(
            f"custom_chat_template: {text_or_file!r} is neither a Jinja text (it holds no {{{{ or {{%) nor a file "
            f"(looked at {file.absolute()})"
        )
    return file.read_text(encoding="utf-8")


def _check_folder(where: str, given: str) -> None:
    """One clear error for a path that is meant as a folder."""
    folder = Path(where)
    looks_local = where.startswith((".", "/")) or where.count("/") > 1 or folder.exists()
    if not looks_local and "/" in where:
        return
    if not looks_local:
        raise TemplateError(
            f"model {given!r} is neither a folder (looked at {folder.absolute()}) nor a name of the hub, which is "
            "owner/name. Is actor_rollout_ref.model.path spelled right?"
        )
    if not folder.is_dir():
        raise TemplateError(f"model folder {given!r} does not exist (looked at {folder.absolute()})")
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if not any((folder / n).is_file() for n in names):
        raise TemplateError(f"folder {given!r} holds no tokenizer: none of {', '.join(names)} is in it")


def _what_it_is(where: str) -> str:
    if Path(where).exists():
        return ""
    return f"(No folder {Path(where).absolute()} exists, so it was taken for the name of a model on the hub.) "


def _tokenizer_file(where: str, revision: str | None) -> str | None:
    return _file_of(where, "tokenizer.json", revision)


def _generation_eos(where: str, revision: str | None) -> list[int]:
    """The eos ids of `generation_config.json`, else of `config.json`; none where neither has any."""
    for name in ("generation_config.json", "config.json"):
        file = _file_of(where, name, revision)
        if file is None:
            continue
        eos = json.loads(Path(file).read_text(encoding="utf-8")).get("eos_token_id")
        if eos is not None:
            return [int(i) for i in (eos if isinstance(eos, list) else [eos])]
    return []


def is_multimodal(where: str, revision: str | None) -> bool:
    """Whether a folder, or a name on the hub, has a model that takes images."""
    file = _file_of(where, "config.json", revision)
    return file is not None and "vision_config" in json.loads(Path(file).read_text(encoding="utf-8"))


def _file_of(where: str, name: str, revision: str | None) -> str | None:
    """A file of a local folder or of the hub's cache; None where it has none."""
    if Path(where).is_dir():
        file = Path(where) / name
        return str(file) if file.is_file() else None
    from transformers.utils import cached_file

    return cached_file(
        where,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
