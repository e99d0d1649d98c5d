"""The engine's own process refuses an SGLang that it could not work with, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_mt.engines.sglang import host
from verl_mt.engines.sglang.host_client import HostClient
from verl_mt.errors import ConfigError

CLASSES = [*host._INPUT_CLASSES.values(), "AbortReq"]
CALLS = [*host._INPUT_CLASSES, "abort_request"]


@pytest.mark.parametrize(("kind", "call"), list(zip(CLASSES, CALLS)))
def test_every_call_that_is_missing_is_named(kind, call):
    with_all = SimpleNamespace(**dict.fromkeys(CLASSES))
    manager = type("Manager", (), dict.fromkeys(CALLS))
    host.require_calls("0.5.23", with_all, manager)
    for structs, methods in (([c for c in CLASSES if c != kind], CALLS), (CLASSES, [c for c in CALLS if c != call])):
        with pytest.raises(ConfigError, match=f"SGLang 0.4.9, .* lacks the calls {call}; install 0.5.23"):
            host.require_calls(
                "0.4.9", SimpleNamespace(**dict.fromkeys(structs)), type("Manager", (), dict.fromkeys(methods))
            )


@pytest.mark.slow
def test_an_old_sglang_is_one_clear_error_at_the_start(tmp_path, monkeypatch, run_async):
    package = tmp_path / "sglang"
    (package / "srt" / "managers").mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0.4.9"\n')
    structs = "".join(f"class {name}: pass\n" for name in CLASSES if name != "BeginWeightUpdateReqInput")
    (package / "srt" / "managers" / "io_struct.py").write_text(structs)
    methods = "".join(f"    {name} = None\n" for name in CALLS)
    (package / "srt" / "managers" / "tokenizer_manager.py").write_text(f"class TokenizerManager:\n{methods}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def go():
        client = HostClient({"tp_size": 1})
        try:
            with pytest.raises(ConfigError) as caught:
                await client.start(50.0)
        finally:
            await client.stop()
        return str(caught.value)

    text = run_async(go())
    assert "SGLang 0.4.9, which is installed here, lacks the calls begin_weight_update" in text
    assert "exit code 2" in text and "Traceback" not in text
    log = Path(text.rpartition("log ")[2])
    assert log.is_file(), "the error names it"
    log.unlink()
