"""Pictures of clients as images of prompts, decoded by a helper process."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from ..api.errors import InvalidRequest, RequestFailed
from ..api.image import ImageRules, PromptImage, Size

_MODULE = "octavo.engine.vision.picture_process"
_READ = 2**20
MAX_IMAGES = 64  # of one prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureLimits:
    """The most that one picture may take: bytes as it is sent, pixels as it is decoded, seconds, and memory
    of the helper process."""

    max_bytes: int = 20 * 1024**2
    max_pixels: int = 36_000_000
    seconds: float = 10.0
    start_s: float = 30.0
    memory_bytes: int = 2 * 1024**3


class _Ended(Exception):
    """The helper process has closed its pipes, or does not answer in time."""


class PictureReader:
    """One helper process, started when it is first needed and again after each death. Any thread may call."""

    def __init__(self, rules: ImageRules, limits: PictureLimits | None = None) -> None:
        self.rules, self.limits = rules, limits or PictureLimits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def read(self, data: bytes) -> PromptImage:
        """Return the image of a picture file's bytes. InvalidRequest for one that cannot be used,
        RequestFailed without a helper process."""
        limits = self.limits
        if not data or len(data) > limits.max_bytes:
            raise InvalidRequest(
                f"a picture must have 1 to {limits.max_bytes} bytes, got {len(data)}; scale it down"
            )
        with self._lock:
            self._start()
            try:
                answer, pixels = self._exchange({"size": len(data)}, data, limits.seconds)
            except _Ended as error:
                self._end()
                raise InvalidRequest(f"a picture must be decoded in its limits, but {error}") from None
        if "refused" in answer:
            raise InvalidRequest(f"a picture cannot be used: {answer['refused']}")
        return PromptImage.of(self.rules, Size(answer["height"], answer["width"]), pixels)

    def close(self) -> None:
        """End the helper process, for good."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()  # whoever reads from it is told so
        with self._lock:
            self._end()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        if self._is_closed:
            raise RequestFailed("the engine was stopped")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # a terminal's Ctrl-C is for the engine's process
            )
            setup = {"rules": asdict(self.rules)} | asdict(self.limits)
            self._exchange(setup, b"", self.limits.start_s)
        except (OSError, _Ended) as error:
            self._end()
            raise RequestFailed(
                f"the helper process that decodes pictures did not start ({error}); it needs Pillow: "
                "pip install 'octavo[vision]'"
            ) from None

    def _exchange(self, message: dict[str, Any], more: bytes, seconds: float) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a message and the pixels behind it. Raises _Ended."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        deadline, got = time.monotonic() + seconds, bytearray()
        data = memoryview(json.dumps(message).encode() + b"\n" + more)
        os.set_blocking(process.stdin.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(process.stdin, selectors.EVENT_WRITE)
            while (found := _message(got)) is None:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise _Ended(f"this took more than {seconds:g} s")
                for key, _ in ready:
                    if key.fileobj is process.stdout:
                        if not (part := os.read(key.fd, _READ)):
                            raise _Ended("the helper process ended")
                        got += part
                        continue
                    try:
                        data = data[os.write(key.fd, data[:_READ]) :]
                    except BlockingIOError:
                        continue
                    except BrokenPipeError:
                        raise _Ended("the helper process ended") from None
                    if not data:
                        selector.unregister(process.stdin)
        return found

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.kill()
        process.wait()


def _message(got: bytearray) -> tuple[dict[str, Any], bytes] | None:
    """Return the answer that was received and its pixels; None while some of it is missing."""
    end = got.find(b"\n", 0, 4096)
    if end < 0:
        return None
    answer: dict[str, Any] = json.loads(got[:end])
    size = 3 * answer.get("height", 0) * answer.get("width", 0)
    if len(got) < end + 1 + size:
        return None
    return answer, bytes(got[end + 1 : end + 1 + size])
