"""An SGLang HTTP server that ends with whoever started it: `python -m verl_mt.engines.sglang.launched_server FD ARGS`.

FD is the reading end of a pipe; when its writing end closes (the starter ended, however it ended), so does the server.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def _end_with(descriptor: int) -> None:
    os.read(descriptor, 1)
    # The process was started as the leader of a group of its own: this ends SGLang's processes too.
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main(descriptor: int, arguments: list[str]) -> None:
    """Serve until killed."""
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_end_with, args=(descriptor,), daemon=True).start()

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(arguments))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
