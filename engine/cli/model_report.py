from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ..api.config import EngineConfig
from ..memory.budget import format_size


def examine_model(config: EngineConfig) -> dict[str, Any]:
    """Load a model and return a report for JSON. Raises ModelLoadError or InvalidConfig."""
    from ..executor.load.discover import discover_layout
    from ..executor.load.loader import load_model
    from ..executor.load.prepare import choose_device, make_ready, model_ops
    from ..executor.recurrent.mixers import describe_mixers
    from ..memory.model_files import resolve_model

    path = resolve_model(config.model, config.revision)
    choice = choose_device(config)
    ops = model_ops(choice.backend)
    loaded = load_model(path, weights=config.weights, ops=ops)
    layout = discover_layout(loaded.model, loaded.architecture)
    ready = make_ready(loaded, layout, choice, exact=config.exact)
    result, report, fusion = ready.result, ready.report, ready.fusion
    unfused = f"the {choice.backend.name} backend runs MLX's own modules"
    recurrent = result.recurrent
    native = [] if recurrent is None else [id(module) for module in recurrent.native_modules()]
    covered = {name for name, module in loaded.model.named_modules() if id(module) in native}
    return {
        "name": config.model,
        "architecture": loaded.architecture,
        "weights": loaded.weights,
        "recurrent": "" if recurrent is None else describe_mixers(recurrent.mixers),
        "recurrences": {
            name: {"native": kernels, "mlx": operations}
            for name, (kernels, operations) in (
                {} if recurrent is None else recurrent.count_cut_points()
            ).items()
        },
        "slot_bytes": layout.slot_bytes,
        "probe_error": result.error,
        "probe_limit": result.limit,
        "selects_rows": result.selects_rows,
        "replaced": report.replaced if report else {},
        "functions": list(report.functions) if report else [],
        "kept": [asdict(kept) for kept in report.kept if kept.name not in covered] if report else [],
        "merged": report.merged if report else {},
        "apart": [asdict(kept) for kept in report.apart] if report else [],
        "fused": fusion is not None and not fusion.not_fused,
        "not_fused": unfused if fusion is None else fusion.not_fused,
        "replayed": ready.replays,
        "not_replayed": (unfused if fusion is None else fusion.not_replayed),
        "head_chooses": ready.fused_argmax,
        "head_does_not_choose": (unfused if fusion is None else fusion.stores_logits),
    }


def model_lines(model: dict[str, Any]) -> Iterator[str]:
    yield f"model {model['name']}: {model['architecture']}, {model['weights']} weights"
    error, limit = model["probe_error"], model["probe_limit"]
    yield f"  error of attention through pages: {error:.2g} (limit {limit:.2g})"
    if model["recurrent"]:
        size = format_size(model["slot_bytes"])
        yield f"  recurrent layers: {model['recurrent']}, {size} of state per sequence"
        for name, by in model["recurrences"].items():
            where = [f"{by['native']} by a native kernel"] * (by["native"] > 0)
            where += [f"{by['mlx']} by mlx-lm's operations"] * (by["mlx"] > 0)
            yield f"  {name}: {', '.join(where)}"
    if not model["selects_rows"]:
        yield "  the output head computes every row"
    yield f"  native modules: {_counts(model['replaced'])}"
    yield f"  native functions: {', '.join(model['functions']) or 'none'}"
    kept: Counter[tuple[str, str]] = Counter((kept["type"], kept["reason"]) for kept in model["kept"])
    for (kind, why), count in kept.items():
        first = next(k["name"] for k in model["kept"] if (k["type"], k["reason"]) == (kind, why))
        yield f"  computed by MLX: {count} x {kind} ({first}{', ...' if count > 1 else ''}): {why}"
    yield f"  merged: {_counts(model['merged'])}"
    for group in model["apart"]:
        yield f"  not merged: {group['name']} ({group['type']}): {group['reason']}"
    yield f"  fused: {'yes, bit-identical' if model['fused'] else 'no, ' + model['not_fused']}"
    replayed = "yes" if model["replayed"] else "no, " + model["not_replayed"]
    yield f"  steps replayed: {replayed}"
    chooses = "yes" if model["head_chooses"] else "no, " + model["head_does_not_choose"]
    yield f"  greedy tokens without stored logits: {chooses}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"
