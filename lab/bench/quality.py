"""``octavo bench quality``: effects of each page format on predictions and memory.

The benchmark compares each format with bf16 pages by perplexity, agreement of the likeliest token, and
divergence of predictions. It also reports bytes per token and decode speed.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidConfig
from octavo.engine.arguments.options import add_engine_arguments, given_settings
from octavo.engine.arguments.usage import counts, positive, whole_number
from octavo.engine.frontend.llm import LLM
from octavo.kernels.formats import FORMATS_WITH_KERNELS, RECIPE, FormatPair, format_pair, page_format
from octavo.kernels.residual import RESIDUAL_SETTINGS, SIXTEEN_BITS

from ..plots.figure import require_matplotlib
from .quality_measures import (
    Document,
    Predictions,
    decode_rate,
    divergence,
    ledger_documents,
    paired_difference,
    perplexity_ratio,
    predict,
    row_errors,
    text_documents,
)
from .quality_report import plot, render

DEFAULT_FORMATS = (*FORMATS_WITH_KERNELS, RECIPE, "int8/fp4")
SEQUENCES = 8  # sequences computed at once
SPARE_TOKENS = 512  # additional positions per sequence
ROW_DIM = 128


@dataclass(frozen=True, slots=True)
class Pages:
    """Page formats to measure.

    residual_pages   last pages of a sequence that are read in 16 bits (None: default)
    """

    pair: FormatPair
    residual_pages: int | None = None

    def __str__(self) -> str:
        """Return the name: "fp4", or "fp4+2" if ``residual_pages`` was given."""
        return str(self.pair) if self.residual_pages is None else f"{self.pair}+{self.residual_pages}"


BASELINE = Pages(format_pair("bf16"))


@dataclass(frozen=True, slots=True)
class Measured:
    """A page format's predictions of every document, and its memory."""

    predictions: list[Predictions]
    bytes_per_token: float
    residual_pages: int
    decode_tokens_per_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--formats", type=format_pairs, default=",".join(DEFAULT_FORMATS), metavar="F,K/V,...",
        help="page formats to measure; K/V if keys and values differ, F+N with N residual pages")  # fmt: skip
    add("--lengths", type=counts, default="500,1000,2000", metavar="N,N",
        help="lengths of documents in tokens")  # fmt: skip
    add("--documents", type=positive, default=12, metavar="N", help="number of documents of each length")
    add("--text", type=Path, metavar="FILE", help="text file to measure on, instead of synthetic ledgers")
    add("--seed", type=whole_number, default=1, metavar="N", help="seed of the synthetic ledgers")
    add("--plot", type=Path, metavar="F.png", help="image file for a plot of recall and divergence (needs "
        "matplotlib)")  # fmt: skip
    add_engine_arguments(parser)


def format_pairs(text: str) -> list[Pages]:
    """Return formats from a text such as "fp4,int8/fp4,fp4+0", for argparse."""
    pairs = []
    for part in text.split(","):
        formats, plus, number = part.strip().partition("+")
        if plus and not number.isdecimal():
            raise argparse.ArgumentTypeError(
                f"{part.strip()!r} must be a page format, + and a number of residual pages, such as fp4+2"
            )
        k, _, v = formats.partition("/")
        try:
            pair = FormatPair(page_format(k).name, page_format(v or k).name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        pairs.append(Pages(pair, int(number) if plus else None))
    return list(dict.fromkeys(pairs))


def run(args: argparse.Namespace) -> dict[str, Any]:
    _check(args)
    pairs = [BASELINE, *(pair for pair in args.formats if pair != BASELINE)]
    documents: list[Document] = []
    measured: dict[Pages, Measured] = {}
    refused: dict[str, str] = {}
    with tqdm(total=len(pairs), unit="format", disable=None) as bar:
        for pair in pairs:
            try:
                measured[pair] = _measure(args, pair, documents)
            except InvalidConfig as refusal:
                if pair == BASELINE:
                    raise
                refused[str(pair)] = str(refusal)
            bar.update()
    formats = {
        str(pair): _row(pair, each, measured[BASELINE], documents, recall=_asks(args))
        for pair, each in measured.items()
    }
    result = {
        "bench": "quality",
        "model": _model(args),
        "text": "ledgers" if args.text is None else str(args.text),
        "documents": len(documents),
        "tokens": sum(len(document.token_ids) for document in documents),
        "baseline": str(BASELINE),
        "recall": "measured"
        if _asks(args)
        else "skipped: only the demo model is made to answer from ledgers",
        "formats": formats,
        "rows": list(formats.values()),
        "refused": refused,
    }
    print(render(result))
    if args.plot is not None:
        plot(result, args.plot)
    return result


def _check(args: argparse.Namespace) -> None:
    if args.kv_format is not None:
        raise InvalidConfig("--kv-format is what this benchmark varies; name the formats with --formats")
    require_matplotlib(args.plot)


def _model(args: argparse.Namespace) -> str:
    return args.model or EngineConfig().model


def _asks(args: argparse.Namespace) -> bool:
    return _model(args) == "demo" and args.text is None


def _measure(args: argparse.Namespace, pages: Pages, documents: list[Document]) -> Measured:
    settings, pair = {"max_running": SEQUENCES, **given_settings(args)}, pages.pair
    if pages.residual_pages is not None:
        settings["residual_pages"] = pages.residual_pages
    if {pair.k, pair.v} <= set(SIXTEEN_BITS):
        settings = {name: value for name, value in settings.items() if name not in RESIDUAL_SETTINGS}
    if settings.keys().isdisjoint({"num_pages", "kv_memory"}):
        page_size = settings.get("page_size", EngineConfig().page_size)
        settings["num_pages"] = -(-SEQUENCES * (max(args.lengths) + SPARE_TOKENS) // page_size)
    with LLM(EngineConfig(**settings, kv_format=str(pair))) as llm:
        if not documents:
            documents += _documents(args, llm)
        predictions = predict(llm, documents)
        info = llm.info
        return Measured(
            predictions,
            bytes_per_token=(info.memory.pages - info.memory.residual) / (info.num_pages * info.page_size),
            residual_pages=info.residual_pages,
            decode_tokens_per_s=decode_rate(llm, documents),
        )


def _documents(args: argparse.Namespace, llm: LLM) -> list[Document]:
    limit = llm.info.max_model_len - SPARE_TOKENS
    if max(args.lengths) > limit:
        raise InvalidConfig(f"--lengths must be at most {limit} for this model, got {max(args.lengths)}")
    if args.text is not None:
        return text_documents(llm.tokenizer, args.text, args.lengths, args.documents)
    return ledger_documents(llm.tokenizer, args.lengths, args.documents, args.seed)


def _row(
    pages: Pages, measured: Measured, base: Measured, documents: list[Document], *, recall: bool
) -> dict[str, Any]:
    pair = pages.pair
    pairs = list(zip(base.predictions, measured.predictions, strict=True))
    weights = [len(mine.logprobs) for mine, _ in pairs]
    agreement = [(mine.top_ids[:, 0] == other.top_ids[:, 0]).mean() for mine, other in pairs]
    change = perplexity_ratio(base.predictions, measured.predictions)
    row = {
        "format": str(pages),
        "tokens": sum(weights),
        "k_format": pair.k,
        "v_format": pair.v,
        "residual_pages": measured.residual_pages,
        "bytes_per_token": measured.bytes_per_token,
        "perplexity": _perplexity(measured),
        "perplexity_difference": _perplexity(measured) - _perplexity(base),
        "ratio": change.ratio,
        "ratio_se": change.standard_error,
        "top1_agreement": float(np.average(agreement, weights=weights)),
        "kl": float(np.average([divergence(*each) for each in pairs], weights=weights)),
        "k_row_error": row_errors(pair.k, ROW_DIM),
        "v_row_error": row_errors(pair.v, ROW_DIM),
        "decode_tokens_per_s": measured.decode_tokens_per_s,
    }
    return row | {"recall": _recall(measured, base, documents)} if recall else row


def _perplexity(measured: Measured) -> float:
    return float(np.exp(-np.concatenate([each.logprobs for each in measured.predictions]).mean()))


def _recall(
    measured: Measured, base: Measured, documents: list[Document]
) -> dict[str, dict[str, float | None]]:
    rows: dict[str, dict[str, float | None]] = {}
    for length in sorted({document.length for document in documents}):
        asked = [index for index, document in enumerate(documents) if document.length == length]
        pairs = [
            (np.array(base.predictions[i].right_answers(documents[i])),
             np.array(measured.predictions[i].right_answers(documents[i])))
            for i in asked
        ]  # fmt: skip
        change = paired_difference(pairs)
        rows[str(length)] = {
            "exact": float(np.concatenate([right for _, right in pairs]).mean()),
            "questions": sum(len(right) for _, right in pairs),
            "lost": int(sum((before & ~right).sum() for before, right in pairs)),
            "gained": int(sum((right & ~before).sum() for before, right in pairs)),
            "difference": change.mean,
            "standard_error": change.standard_error,
        }
    return rows
