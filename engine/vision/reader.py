from __future__ import annotations

import threading
from dataclasses import asdict, dataclass

from ..api.errors import InvalidRequest, RequestFailed
from ..api.image import ImageRules, PromptImage, Size
from ..structured_output.helper_process import HelperEnded, HelperLate, HelperProcess, HelperUnavailable

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

    def __init__(self, rules: ImageRules, limits: PictureLimits | None = None) -> None:
        self.rules, self.limits = rules, limits or PictureLimits()
        setup = {"rules": asdict(rules)} | asdict(self.limits)
        super().__init__("octavo.engine.vision.picture_process", setup, self.limits.start_s)
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
            try:
                self._start()
                answer = self._ask({}, limits.seconds, data)
            except HelperUnavailable as error:
                raise RequestFailed(
                    f"a picture could not be decoded, because {error}; it needs Pillow: pip install "
                    "'.[vision]'"
                ) from None
            except (HelperEnded, HelperLate) as error:
                self._end()
                raise InvalidRequest(f"a picture must be decoded within its limits, but {error}") from None
        if "refused" in answer:
            raise InvalidRequest(f"a picture cannot be used: {answer['refused']}")
        return PromptImage.of(self.rules, Size(answer["height"], answer["width"]), answer["bytes"])

    def close(self) -> None:
        self._is_closed = True
        self.interrupt()
        with self._lock:
            self._end()
