from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass
from typing import Any

from ..api.errors import InvalidRequest, RequestFailed
from ..api.image import ImageRules, PromptImage, Size
from ..structured_output.helper_process import HelperEnded, HelperLate, HelperProcess

MAX_IMAGES = 64  # per prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureLimits:
    max_bytes: int = 20 * 1024**2
    max_pixels: int = 36_000_000
    seconds: float = 10.0
    start_s: float = 30.0
    memory_bytes: int = 2 * 1024**3


class PictureReader(HelperProcess):
    """Helper process that decodes images. Thread-safe."""

    _module = "octavo.engine.vision.picture_process"
    _patience_s = 0.0

    def __init__(self, rules: ImageRules, limits: PictureLimits | None = None) -> None:
        super().__init__()
        self.rules, self.limits = rules, limits or PictureLimits()
        self._lock = threading.Lock()

    def read(self, data: bytes) -> PromptImage:
        """Return a decoded image. Raises InvalidRequest for an unusable file, or RequestFailed."""
        limits = self.limits
        if not data or len(data) > limits.max_bytes:
            remedy = "scale it down" if data else "send the whole file"
            raise InvalidRequest(
                f"a picture must have 1 to {limits.max_bytes} bytes, got {len(data)}; {remedy}"
            )
        with self._lock:
            self._start()
            try:
                answer, pixels = self._ask({"size": len(data)}, data, limits.seconds)
            except (HelperEnded, HelperLate) as error:
                self._end()
                raise InvalidRequest(f"a picture must be decoded within its limits, but {error}") from None
        if "refused" in answer:
            raise InvalidRequest(f"a picture cannot be used: {answer['refused']}")
        return PromptImage.of(self.rules, Size(answer["height"], answer["width"]), pixels)

    def close(self) -> None:
        self._is_closed = True
        self.interrupt()
        with self._lock:
            self._end()

    def _start(self) -> None:
        if self._is_running:
            return
        self._end()
        if self._is_closed:
            raise RequestFailed("the engine was stopped")
        try:
            self._spawn()
            setup = {"rules": asdict(self.rules)} | asdict(self.limits)
            self._ask(setup, b"", self.limits.start_s)
        except (OSError, HelperEnded, HelperLate) as error:
            self._end()
            raise RequestFailed(
                f"the helper process that decodes pictures did not start ({error}); it needs Pillow: "
                "pip install '.[vision]'"
            ) from None

    def _ask(self, message: dict[str, Any], more: bytes, seconds: float) -> tuple[dict[str, Any], bytes]:
        return self._exchange(json.dumps(message).encode() + b"\n" + more, seconds, _message)


def _message(got: bytearray) -> tuple[dict[str, Any], bytes] | None:
    end = got.find(b"\n", 0, 4096)
    if end < 0:
        return None
    answer: dict[str, Any] = json.loads(got[:end])
    size = 3 * answer.get("height", 0) * answer.get("width", 0)
    if len(got) < end + 1 + size:
        return None
    pixels = bytes(got[end + 1 : end + 1 + size])
    del got[: end + 1 + size]
    return answer, pixels
