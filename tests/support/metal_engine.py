from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from late_device import LateDevice
from metal_backend import Emulator
from octavo.engine.api.config import EngineConfig
from octavo.engine.executor.device_step import DeviceStep
from octavo.engine.executor.load import load
from octavo.engine.frontend.llm import LLM
from octavo.kernels.backends import BackendSelection


@contextmanager
def metal_engine(folder: Path, device: Emulator, *, warms_up: bool = False, **settings: Any) -> Iterator[LLM]:
    small: dict[str, Any] = {"page_size": 16, "num_pages": 40, "max_running": 6, "max_step_tokens": 48}
    with pytest.MonkeyPatch.context() as patch:
        if not warms_up:
            patch.setattr(load, "warm_up", lambda *_, **__: None)
        patch.setattr(load, "choose_device", lambda _: BackendSelection(device.backend(), "emulated"))
        if isinstance(device, LateDevice):
            resolve = DeviceStep.resolve

            def resolving(step: DeviceStep) -> Any:
                device.wait_for(step.arrays)
                return resolve(step)

            patch.setattr(DeviceStep, "resolve", resolving)
            with (
                device.in_place_of_mlx(),
                LLM(EngineConfig(model=str(folder), backend="metal", **(small | settings))) as llm,
            ):
                yield llm
            return
        with LLM(EngineConfig(model=str(folder), backend="metal", **(small | settings))) as llm:
            yield llm
