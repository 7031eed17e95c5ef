from __future__ import annotations

from dataclasses import dataclass

from ..interface import LayerSpec
from .units import format_source


@dataclass(frozen=True, slots=True, kw_only=True)
class PageReaderConfig:
    layer: LayerSpec
    page_size: int
    k_format: str
    v_format: str
    sinks: bool
    softcap: bool = False
    bounded: bool = False

    def tile_bytes(self, keys: int) -> tuple[int, int]:
        layer = self.layer
        return (
            keys * (layer.head_dim + 8) * format_source(self.k_format).tile_bytes,
            keys * (layer.value_dim + 8) * format_source(self.v_format).tile_bytes,
        )

    def name_with(self, heads: str) -> str:
        layer = self.layer
        options = {"s": self.sinks, "c": self.softcap, "b": self.bounded}
        return (
            f"{self.k_format}_{self.v_format}_{layer.head_dim}_{layer.value_dim}_{heads}_p{self.page_size}"
            f"_w{layer.window or 0}_k{layer.keep}_" + "".join(letter for letter, on in options.items() if on)
        )

    def visibility_macros(self) -> dict[str, int | str]:
        return {
            "PAGE_SIZE": self.page_size,
            "WINDOW": self.layer.window or int(self.bounded),
            "SINCE(row, position)": "seen_since[row]" if self.bounded else "((position) - WINDOW + 1)",
            "KEEP": self.layer.keep,
            "SOFTCAP": int(self.softcap),
            "SINKS": int(self.sinks),
            "SINK(head)": "sinks[head]" if self.sinks else "0.0f",
        }
