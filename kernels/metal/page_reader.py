from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..formats import PageFormat, page_format
from ..interface import LayerSpec
from .units import KernelSource, format_source, has_scales, make_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class PageReaderConfig:
    layer: LayerSpec
    page_size: int
    k_format: str
    v_format: str
    sinks: bool
    softcap: bool = False
    bounded: bool = False

    @property
    def formats(self) -> tuple[PageFormat, PageFormat]:
        return page_format(self.k_format), page_format(self.v_format)

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

    def reading_unit(
        self,
        kernel: str,
        suffix: str,
        inputs: tuple[str, ...],
        macros: Mapping[str, int | str],
        *,
        split: bool,
        shared: tuple[str, ...],
        more: tuple[str, ...] = (),
    ) -> KernelSource:
        k_format, v_format = self.formats
        optional = {
            "k_scales": has_scales(k_format, self.layer.head_dim),
            "v_scales": has_scales(v_format, self.layer.value_dim),
            "sinks": self.sinks and not split,
            "seen_since": self.bounded,
        }
        own: dict[str, int | str] = {
            "KEY_SCALES": "k_scales" if optional["k_scales"] else "nullptr",
            "VALUE_SCALES": "v_scales" if optional["v_scales"] else "nullptr",
            "SPLIT": int(split),
        }
        if split:
            own |= {"SINKS": 0, "SINK(head)": "0.0f"}
        return make_unit(
            kernel,
            f"{suffix}{'_split' if split else ''}",
            (
                *inputs, "positions", "page_table", "params", "k_codes", "v_codes", "after",
                *(name for name, on in optional.items() if on), *more,
            ),
            ("partial", "stats", "read") if split else ("out", "read"),
            {**macros, **own},
            {"Keys": k_format, "Values": v_format},
            shared,
        )  # fmt: skip
