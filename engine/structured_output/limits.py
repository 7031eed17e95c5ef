from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20

MAX_DEPTH = 64  # nesting depth of a schema; its compiler recurses
MAX_RULES = 500  # rules of a grammar; llguidance recurses on chains of rules
MAX_REFERENCES = 500  # distinct targets of "$ref"
MAX_VALUES = 50_000  # objects, lists, strings and numbers of a schema
MAX_PROPERTIES = 2_000  # properties of one object; compile time is quadratic
MAX_TAGS = 500
MAX_GRAMMAR_BYTES = 4 * MIB
MAX_LITERAL_BYTES = 2**14  # bytes of one string; masks inside longer strings are slow

STEP_LEXER_FUEL = 100_000
STEP_MAX_ITEMS = 20_000
MAX_ITEMS_IN_ROW = 2_000
MAX_LEXER_STATES = 50_000
MAX_GRAMMAR_SIZE = 100_000  # symbols in a compiled grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileLimits:
    """Limits of one compilation, and of the queue.

    first_mask_s           CPU seconds of the first mask
    wall_s                 wall seconds before the helper process is ended
    stack_bytes            stack of the helper process
    own_stack_bytes        stack of the engine's compiling threads
    max_queued_per_tenant  maximum number of queued compilations of one tenant
    """

    compile_s: float = 1.0
    first_mask_s: float = 0.02
    cpu_s: int = 2
    wall_s: float = 10.0
    start_s: float = 60.0
    memory_bytes: int = 128 * MIB
    stack_bytes: int = 8 * MIB
    own_stack_bytes: int = 64 * MIB
    num_helpers: int = 2
    max_queued: int = 64
    max_queued_per_tenant: int = 16
