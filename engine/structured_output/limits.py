"""What one request's schema or grammar may cost. Imports nothing, for the helper processes' sake."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20

# What a source may hold, counted before anything is compiled.
MAX_DEPTH = 64  # nesting of a schema: its compiler recurses
MAX_RULES = 500  # rules of a grammar: one may lead to the next, and llguidance follows chains by recursion
MAX_REFERENCES = 500  # different targets of "$ref", likewise
MAX_VALUES = 50_000  # objects, lists, strings and numbers of a schema
MAX_PROPERTIES = 2_000  # of one object: compiling takes the square of their number
MAX_TAGS = 500
MAX_GRAMMAR_BYTES = 4 * MIB  # what llguidance is given in the end
MAX_LITERAL_BYTES = 2**14  # of one string: the first mask of a longer one takes 20 ms and more

# Of the parser while it runs: about 7 ms of its lexer and 2 ms of its items for one mask, as documented.
STEP_LEXER_FUEL = 100_000
STEP_MAX_ITEMS = 20_000
MAX_ITEMS_IN_ROW = 2_000  # a schema of so many alternatives or optional properties has as many
MAX_LEXER_STATES = 50_000
MAX_GRAMMAR_SIZE = 100_000  # symbols


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileLimits:
    """Of one compilation, and of those that wait for one.

    compile_s            CPU seconds that it may take to be accepted: the engine's process spends them again
    first_mask_s         CPU seconds that the mask of the first token may take
    cpu_s                CPU seconds after which the system ends the helper process; whole seconds
    wall_s               seconds after which the helper process is ended, however busy the machine is
    start_s              seconds that a helper process may take to start and to read the tokenizer
    memory_bytes         address space that a compilation may add to the helper process
    stack_bytes          stack that it may use there
    own_stack_bytes      stack of the engine's own threads that compile what has been vetted: far more
    num_helpers          helper processes, each with a thread of the engine's process that waits for it
    max_queued           compilations that wait for a helper
    max_queued_per_tenant  of these, one tenant's
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
