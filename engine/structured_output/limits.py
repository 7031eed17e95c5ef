"""Limits of a request's schema or grammar. Imports nothing, so that helper processes start fast."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20

# Limits of a source, checked before compiling.
MAX_DEPTH = 64  # nesting of a schema, because its compiler recurses
MAX_RULES = 500  # rules of a grammar, because llguidance follows chains of rules by recursion
MAX_REFERENCES = 500  # different targets of "$ref", because they are followed by recursion, too
MAX_VALUES = 50_000  # objects, lists, strings and numbers of a schema
MAX_PROPERTIES = 2_000  # properties of one object; compiling takes time in proportion to their square
MAX_TAGS = 500
MAX_GRAMMAR_BYTES = 4 * MIB  # size of the grammar passed to llguidance
MAX_LITERAL_BYTES = 2**14  # length of one string; the first mask of a longer one takes 20 ms or more

# Limits of the parser per mask: about 7 ms for its lexer and 2 ms for its Earley items, as documented.
STEP_LEXER_FUEL = 100_000
STEP_MAX_ITEMS = 20_000
MAX_ITEMS_IN_ROW = 2_000  # Earley items in a row: each alternative or optional property of a schema adds one
MAX_LEXER_STATES = 50_000
MAX_GRAMMAR_SIZE = 100_000  # symbols in a compiled grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileLimits:
    """Limits of one compilation, and of waiting compilations.

    compile_s            CPU seconds of compiling; then the engine's process compiles again
    first_mask_s         CPU seconds of computing the mask of the first token
    cpu_s                CPU seconds after which the system ends the helper process; whole seconds
    wall_s               seconds after which the helper process is ended, however busy the machine is
    start_s              seconds for a helper process to start and read the tokenizer
    memory_bytes         address space that a compilation may add to the helper process
    stack_bytes          stack that a compilation may use in the helper process
    own_stack_bytes      stack of the engine's compiling threads; far more than a vetted source needs
    num_helpers          helper processes, each with a waiting thread of the engine's process
    max_queued           maximum number of compilations that wait for a helper
    max_queued_per_tenant  maximum number of one tenant's compilations that wait for a helper
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
