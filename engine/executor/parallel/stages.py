"""Pipeline parallel: each rank computes some of the layers.

Rank 0 has the last layers and the output head; the highest rank has the embedding and the first layers. The
rows that a rank receives are an input of its captured program. mlx-lm's ``pipeline`` is not used, because it
receives rows inside the model, where a capture would record them as a constant.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding
from mlx.utils import tree_flatten

from ...api.errors import InvalidConfig
from ...memory.sizing import Sizing
from ..adapt.cache_adapter import LayerCache
from ..adapt.output_head import output_heads, put_module
from ..adapters.layers import RankLayers
from ..batch import NO_ROWS, Batch
from ..cache_layout import AttentionCache, CacheLayout, CachePlace
from ..load.discover import discover_layout
from ..mlx_lm_import import cache as caches_of_mlx_lm
from ..model_runner import PagedRunner
from ..overrides import overridden, override_call
from .group import RankGroup
from .shards import Shard

HIDDEN = "hidden_rows"  # int32 [T, bytes of a row / 4]
NUM_STAND_INS = 64
_DTYPES = (mx.float32, mx.bfloat16, mx.float16)
_TABLES = (Embedding, QuantizedEmbedding)


class Stage(Shard):
    def __init__(self, group: RankGroup, *, embeds: bool = False) -> None:
        super().__init__(group)
        self.gives_logits = group.rank == 0
        self._embeds = embeds
        self._is_first = group.rank == group.size - 1
        self.groups = ()
        self.num_machines = group.size // group.num_here

    def split(self, model: Any) -> None:
        kind, rank, size = type(model).__module__.rpartition(".")[2], self._group.rank, self._group.size
        self.layers = RankLayers(elsewhere={path for path, _ in model.named_modules()})
        self.whole = discover_layout(model, kind)
        try:
            found = _observe(model, self.whole)
        except Exception as error:
            raise InvalidConfig(
                f"pipeline_parallel must be 1 for {kind} models, whose layers cannot be separated "
                f"({str(error).partition(chr(10))[0] or type(error).__name__}), got {size}"
            ) from error
        count = len(found.layers)
        stages = [
            range(-(count * (r + 1 - size) // size), -(count * (r - size) // size)) for r in range(size)
        ]
        if not all(any(found.places[layer] for layer in stage) for stage in stages):
            raise InvalidConfig(
                f"pipeline_parallel must leave at least one layer with a cache for each rank, got {size} for "
                f"{count} layers; choose a smaller number"
            )
        own = stages[rank]
        places = sorted({place for layer in own for place in found.places[layer]})
        self._members = [layer for place in places for layer in _layers_of(self.whole.caches[place])]
        if not self._is_first:
            self._dtype = _DTYPES[self._group.receive((1,), rank + 1)[0]]
            self._row_words = found.width * self._dtype.size // 4
        self._separate(model, found, own)
        _give_caches(model, places)
        if not self.gives_logits:
            dtype = model(mx.array([[0]])).dtype
            self._group.send(np.array([_DTYPES.index(dtype)], np.int32), rank - 1)

    def _separate(self, model: Any, found: _Found, own: range) -> None:
        layers = list(found.layers)
        kept = {id(module) for index in own for _, module in layers[index].named_modules()}
        for index, layer in enumerate(layers):
            if index not in own:
                found.layers[index] = _OtherLayer(layer)
                for _, module in layer.named_modules():
                    if id(module) not in kept:
                        _drop_arrays(module)
        if not self._is_first:
            for path, table in found.tables.items():
                if not (self.gives_logits and (self._embeds or id(table) in found.tied)):
                    width = table(mx.array([0])).shape[-1]
                    put_module(model, path, _StandIns(width, self._dtype))
            override_call(layers[own[0]], self._receiving(type(layers[own[0]])))
        if not self.gives_logits:
            for path in found.heads:
                put_module(model, path, None)
            found.layers[own.stop] = _NextRank(layers[own.stop])

    def _receiving(self, kind: Any) -> Callable[..., Any]:
        def call(layer: Any, x: mx.array, *args: Any, **kwargs: Any) -> Any:
            rows = self.row_inputs.get(HIDDEN)
            x = x if rows is None else rows.view(self._dtype)[:, None]
            return kind.__call__(layer, x, *args, **kwargs)

        return call

    def available(self, usable: Callable[[int], int], weight_bytes: int) -> int:
        return super().available(usable, weight_bytes) * self._group.size

    def layouts(self, found: CacheLayout) -> tuple[CacheLayout, CacheLayout]:
        return replace(found, vocab_size=self.whole.vocab_size), self.whole

    def slot_bytes(self, own: int) -> int:
        return self._group.total(own)

    def own(
        self, found: CacheLayout, whole: CacheLayout, size: Sizing, sized: Callable[[CacheLayout], Sizing]
    ) -> tuple[CacheLayout, Sizing]:
        own = replace(found, layers=tuple(whole.layers[index] for index in self._members))
        if not own.layers:
            return own, size
        own_size = sized(own)
        kinds = [(group.window, group.keep, group.chunked) for group in size.groups]
        groups = [kinds.index((group.window, group.keep, group.chunked)) for group in own_size.groups]
        self.groups = [*groups, *(len(kinds) + index for index in groups if size.residual)]
        return own, replace(
            own_size, specs=tuple(size.specs[index] for index in self.groups), needs=size.needs
        )

    def receive(self, batch: Batch) -> Batch:
        if self.groups:
            batch = batch._replace(attention=batch.attention.select(self.groups))
        if self._is_first:
            return batch
        rows = self._group.receive((len(batch.token_ids), self._row_words), self._group.rank + 1)
        return batch._replace(inputs={**batch.inputs, HIDDEN: rows})

    def follow(self, runner: PagedRunner, batch: Batch) -> tuple[int, ...]:
        batch = batch._replace(sample_rows=NO_ROWS, scored=None, hidden=None)
        output = runner.run(self.receive(batch), None)
        assert output.hidden is not None
        self._group.send(output.hidden.view(np.int32), self._group.rank - 1)
        return output.failed_rows


class _Found(NamedTuple):
    """Parts of a model.

    layers  the list of layers inside the model
    places  for each layer, the indices of its caches in the list of caches
    tables  embeddings by path
    tied    ids of embeddings that are also output heads
    heads   paths of other output heads
    """

    layers: list[Any]
    places: list[set[int]]
    tables: dict[str, Any]
    tied: set[int]
    heads: list[str]
    width: int


def _observe(model: Any, layout: CacheLayout) -> _Found:
    """Return the parts of a model. Raises ValueError if a layer needs more than the previous layer's rows.

    A forward with NaN as embeddings finds all values that depend on them. It reads no weights of layers.
    """
    layers, caches = list(model.layers), caches_of_mlx_lm.make_prompt_cache(model)
    lists = [
        value
        for _, module in model.named_modules()
        for value in module.values()
        if isinstance(value, list) and list(map(id, value)) == list(map(id, layers))
    ]
    if len(lists) != 1:
        raise ValueError(f"its layers are in {len(lists)} lists")
    inside = {id(module) for layer in layers for _, module in layer.named_modules()}
    outside = {path: module for path, module in model.named_modules() if id(module) not in inside}
    tables = {path: module for path, module in outside.items() if isinstance(module, _TABLES)}
    heads = [path for path, _ in output_heads(model, layout.vocab_size)]
    calls: list[tuple[mx.array, mx.array, list[Any]]] = []
    tied: set[int] = set()

    def embed(table: Any, ids: mx.array) -> mx.array:
        plain: Any = type(table).__bases__[0]
        rows = plain.__call__(table, ids)
        return mx.full(rows.shape, math.nan, rows.dtype)

    def as_linear(table: Any, x: mx.array) -> mx.array:
        tied.add(id(table))
        return x

    def compute(layer: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if len(calls) == len(layers) or layer is not layers[len(calls)]:
            raise ValueError("they are not computed in turn")
        y = mx.zeros_like(x) if layer is layers[-1] else x + 0
        calls.append((x, y, list(dict(tree_flatten([args, kwargs])).values())))
        return y

    with (
        overridden(layers, compute),
        overridden(tables.values(), embed, as_linear=as_linear),
        overridden((outside[path] for path in heads), lambda _, x: x),
    ):
        output = model(mx.array([[0, 1]]), cache=caches)
    if len(calls) != len(layers) or not _has_nan(calls[0][0]):
        raise ValueError("some are not computed, or the embedding was not found")
    for before, after in itertools.pairwise(calls):
        if after[0] is not before[1]:
            raise ValueError("the rows of a layer change before the next one")
    if _has_nan(output):
        raise ValueError("the output depends on embeddings")
    places = [_places(leaves, caches) for *_, leaves in calls]
    if any(layout.caches[place] for place in set(range(len(caches))).difference(*places)):
        raise ValueError("another module has a cache")
    return _Found(lists[0], places, tables, tied, heads, calls[0][0].shape[-1])


def _places(leaves: Sequence[Any], caches: Sequence[Any]) -> set[int]:
    places: set[int] = set()
    for leaf in leaves:
        if (place := next((i for i, cache in enumerate(caches) if cache is leaf), None)) is not None:
            places.add(place)
        elif isinstance(leaf, mx.array):
            if _has_nan(leaf):
                raise ValueError("they share values that depend on the tokens")
        elif not isinstance(leaf, bool | int | float | str | None):
            raise ValueError(f"they share a {type(leaf).__name__}")
    return places


def _has_nan(x: mx.array) -> bool:
    return bool(mx.issubdtype(x.dtype, mx.floating) and mx.isnan(x).any().item())


def _layers_of(place: CachePlace) -> list[int]:
    if isinstance(place, tuple):
        return [layer for part in place for layer in _layers_of(part)]
    return [place.layer] if isinstance(place, AttentionCache) else []


class _Finished(Exception):
    def __init__(self, rows: mx.array) -> None:
        self.rows = rows


class _OtherLayer:
    """Stand-in for a layer of another rank. It has the layer's settings and returns its input."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, x: mx.array, *_: Any, **__: Any) -> mx.array:
        return x

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class _NextRank(_OtherLayer):
    def __call__(self, x: mx.array, *_: Any, **__: Any) -> mx.array:
        raise _Finished(x)


class _StandIns(Module):
    """Random embeddings for the load-time check of a rank that has no real ones."""

    def __init__(self, width: int, dtype: mx.Dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows = mx.random.normal((NUM_STAND_INS, width), key=mx.random.key(0)).astype(dtype)

    def __call__(self, ids: mx.array) -> mx.array:
        rows: mx.array = self._rows
        return rows[ids % NUM_STAND_INS]


class _BorrowedCache:
    """Stand-in for a cache of another rank; one of this rank's caches gives positions and masks."""

    def __init__(self, cache: Any, *, is_alike: bool) -> None:
        self._cache, self._is_alike = cache, is_alike

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_alike or isinstance(self._cache, LayerCache):
            return None
        return self._cache.make_mask(*args, **kwargs)

    def __getitem__(self, index: int) -> _BorrowedCache:
        return _BorrowedCache(self._cache[index], is_alike=self._is_alike)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _give_caches(model: Any, places: Sequence[int]) -> None:
    kind: Any = type(model)
    all_kinds = list(map(_kind, caches_of_mlx_lm.make_prompt_cache(model)))
    kinds = [all_kinds[place] for place in places]
    attention = next((i for i, each in enumerate(kinds) if each[0] is not caches_of_mlx_lm.ArraysCache), 0)

    def make_cache(_: Any) -> list[Any]:
        plain: Any = caches_of_mlx_lm.KVCache
        caches = kind.make_cache(model) if hasattr(kind, "make_cache") else [plain() for _ in all_kinds]
        return [caches[place] for place in places]

    def spread(caches: Sequence[Any]) -> Iterator[Any]:
        for place, each in enumerate(all_kinds):
            if place in places:
                yield caches[places.index(place)]
            else:
                is_alike = each in kinds
                lender = kinds.index(each) if is_alike else attention
                yield _BorrowedCache(caches[lender], is_alike=is_alike)

    def call(_: Any, inputs: mx.array, cache: Sequence[Any] | None = None, **more: Any) -> mx.array:
        try:
            logits: mx.array = kind.__call__(
                model, inputs, cache=None if cache is None else list(spread(cache)), **more
            )
        except _Finished as finished:
            return finished.rows
        return logits

    override_call(model, call, make_cache=make_cache)


def _kind(cache: Any) -> tuple[Any, ...]:
    parts = getattr(cache, "caches", ())
    return (
        type(cache),
        getattr(cache, "max_size", None),
        getattr(cache, "chunk_size", None),
        *map(_kind, parts),
    )


def _drop_arrays(module: Any) -> None:
    for name in [name for name, value in module.items() if isinstance(value, mx.array)]:
        del module[name]
