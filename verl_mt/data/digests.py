"""SHA-256 of a file: made while it is written, and made again of what is there."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch

_PIECE_BYTES = 2**20


class HashingFile:
    """A binary file that is hashed while it is written: nothing is read again.

    Args:
        file: open for writing, at its beginning. Large pieces are hashed in a second thread while this one writes.
    """

    def __init__(self, file: IO[bytes]):
        self._file, self._hash, self._size = file, hashlib.sha256(), 0
        self._thread: ThreadPoolExecutor | None = None
        self.error: OSError | None = None
        """What the disk refused: torch raises another error for it, which does not say so."""

    def write(self, data: Any) -> int:
        """Runs in the caller's thread. Waits for the hash of a large piece, in a second thread."""
        piece = memoryview(data).cast("B")
        try:
            if piece.nbytes < _PIECE_BYTES:
                self._hash.update(piece)
                self._file.write(piece)
            else:
                self._thread = self._thread or ThreadPoolExecutor(1)
                hashed = self._thread.submit(self._hash.update, piece)
                try:
                    self._file.write(piece)
                finally:
                    hashed.result()  # the memory is the caller's again when this returns
        except OSError as error:
            self.error = error
            raise
        self._size += piece.nbytes
        return piece.nbytes

    def tell(self) -> int:
        return self._size

    def fileno(self) -> int:
        # Whoever asks is about to fsync: what is still in this process goes first.
        self.flush()
        return self._file.fileno()

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self.error = error
            raise

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._file.close()

    def digest(self) -> str:
        """`<SHA-256> <bytes>` of what was written."""
        return f"{self._hash.hexdigest()} {self._size}"


def save_tensors(content: Any, file: IO[bytes]) -> str:
    """`torch.save` into an open file; the digest of what was written.

    Raises:
        OSError: the disk refused.
    """
    hashing = HashingFile(file)
    try:
        torch.save(content, hashing)  # type: ignore[arg-type]
        hashing.flush()
    except RuntimeError as error:
        if hashing.error is not None:
            raise hashing.error from error
        raise
    return hashing.digest()


def damage(path: Path, digest: str) -> str | None:
    """What is wrong with a file that had this digest; None where nothing is."""
    size = int(digest.rpartition(" ")[2])
    try:
        found = path.stat().st_size
        if found != size:
            return f"it has {found} bytes, {size} were written"
        with path.open("rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == digest.partition(" ")[0]
    except FileNotFoundError:
        return "it is missing"
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"
    return None if same else "its bytes are not those that were written (SHA-256 differs)"
