"""`python -m verl_mt.retrieval`: serve a corpus to the search tool.

    python -m verl_mt.retrieval --corpus corpus.jsonl                                  # BM25
    python -m verl_mt.retrieval --corpus corpus.jsonl --dense intfloat/e5-base-v2      # a Hugging Face encoder

The corpus is a .jsonl or .jsonl.gz file with an object per line: `contents` (its first line is the title) and usually
`id`. Everything is held in memory. Needs `pip install "verl_mt[search]"`.
"""

from __future__ import annotations

import argparse
import socket
import sys
from typing import Any

from verl_mt.errors import ConfigError, VerlMTError


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for bad input (one line on stderr)."""
    args = _arguments(argv)
    try:
        listening = _listen(args.host, args.port)
        app = _build(args)
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    import uvicorn

    host, port = listening.getsockname()[:2]
    print(f"retrieval ready: http://{host}:{port}/retrieve", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m verl_mt.retrieval",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--corpus", required=True, help=".jsonl or .jsonl.gz")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 = also for other machines")
    parser.add_argument("--port", type=int, default=8000, help="0 = any free one; the first line printed tells it")
    parser.add_argument("--topk", type=int, default=3, help="passages per query, for requests that do not say")
    parser.add_argument("--dense", metavar="MODEL", help="search with this encoder instead of BM25")
    parser.add_argument("--pooling", default="mean", choices=("mean", "cls"), help="of --dense")
    parser.add_argument("--query-prefix", default="query: ", help="of --dense; what the encoder was trained with")
    parser.add_argument("--passage-prefix", default="passage: ", help="of --dense")
    parser.add_argument("--max-tokens", type=int, default=256, help="of --dense; longer texts are cut")
    parser.add_argument("--batch-size", type=int, default=64, help="of --dense")
    parser.add_argument("--device", default="cpu", help="of --dense")
    return parser.parse_args(argv)


def _listen(host: str, port: int) -> socket.socket:
    """Bound before the corpus is read: a port that is taken is found at once.

    Raises:
        ConfigError: it is.
    """
    try:
        # Accepts nobody until the server runs.
        bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}. Choose another --port (0 = any)") from error
    return bound


def _build(args: argparse.Namespace) -> Any:
    try:
        from verl_mt.extensions.toolbox.retrieval.lexical import BM25Index, read_corpus
        from verl_mt.extensions.toolbox.retrieval.server import make_app
    except ImportError as error:
        raise ConfigError(f'{error.name} is not installed: pip install "verl_mt[search]"') from error
    if args.topk < 1:
        raise ConfigError(f"--topk is {args.topk}, must be at least 1")
    passages = read_corpus(args.corpus)
    if not args.dense:
        return make_app(passages, BM25Index(passages), method="bm25", default_topk=args.topk)
    from verl_mt.extensions.toolbox.retrieval.dense import DenseIndex, EncoderOptions

    options = EncoderOptions(
        args.dense, args.pooling, args.query_prefix, args.passage_prefix, args.max_tokens, args.batch_size, args.device
    )
    return make_app(passages, DenseIndex(passages, options), method=f"dense {args.dense}", default_topk=args.topk)


if __name__ == "__main__":
    sys.exit(main())
