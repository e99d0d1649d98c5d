"""Requests to `late_server.py` from a process that may open few files.

    python many_requests.py URL NUMBER SOFT HARD [full]     prints what came of them

With `full`, other code of the process takes all files, and gives them back a second after the requests began.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import sys

from engine_models import request

from verl_mt.config_paths import resolve_model_path
from verl_mt.extensions.cluster.replicas import open_files
from verl_mt.extensions.cluster.sglang import engine as module
from verl_mt.extensions.cluster.sglang.options import SGLangOptions


async def main(url: str, number: int, full: bool) -> dict:
    module.require_sglang = lambda: None
    options = SGLangOptions(resolve_model_path("verl_mt://tiny"), 100, end_token_ids=frozenset({3}), servers=(url,))
    engine = module.SGLangEngine(options)
    await engine.start()
    most, taken = 0, []
    if full:
        await engine.generate(request([4]))
        await asyncio.sleep(2.5)
        with contextlib.suppress(OSError):
            while True:
                taken.append(open("/dev/null"))  # noqa: SIM115 - closed below
    asked = [asyncio.ensure_future(engine.generate(request([5, k % 50 + 6], f"s{k}"))) for k in range(number)]
    while not all(task.done() for task in asked):
        await asyncio.sleep(0.1)
        if taken:
            await asyncio.sleep(1.0)
            while taken:
                taken.pop().close()
        most = max(most, open_files.num_open())
    answers = await asyncio.gather(*asked, return_exceptions=True)
    found = {
        "stopped": sum(getattr(a, "finish_reason", None) == "stop" for a in answers),
        "errors": sorted({repr(a) for a in answers if isinstance(a, BaseException)})[:3],
        "most_files": most,
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "restarts": engine.metrics()["engine/restarts"],
    }
    await engine.close()
    return found


if __name__ == "__main__":
    soft, hard = map(int, sys.argv[3:5])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    print(json.dumps(asyncio.run(main(sys.argv[1], int(sys.argv[2]), "full" in sys.argv))))
