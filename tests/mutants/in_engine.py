"""Bugs in what a step is built from, in graphs that are replayed, and in how weights leave their files."""

from __future__ import annotations

from mutant import Mutant

BATCH = "engine/executor/batch.py"
REPLAY = "engine/executor/capture/graph_runner.py"
NATIVE_OPS = "engine/executor/native/model_ops.py"
BACKEND = "kernels/cpu/backend.py"
MAPPED = "engine/executor/native/mapped.py"
OVERLAP = "engine/core/overlap.py"
STATES = "block_manager/state_group.py"
SEGMENTS = "engine/executor/recurrent/segments.py"
DEVICE_STEP = "engine/executor/device_step.py"
DEVICE_SAMPLING = "engine/executor/sampling/device_sampling.py"

MUTANTS = (
    # decode steps, which are built from one number of each sequence
    Mutant(
        "a decode step writes to the last page",
        BATCH,
        "last.append(held[used - 1])",
        "last.append(held[-1])",
    ),
    Mutant(
        "a step reads and writes the first group's pages in every group",
        BATCH,
        "held = _table(item).parts[group].pages",
        "held = _table(item).parts[0].pages",
    ),
    Mutant(
        "a step does not see its own tokens",
        BATCH,
        "kv_len=stops,",
        "kv_len=starts,",
    ),
    Mutant(
        "a step draws once for all parallel samples, and for everybody",
        BATCH,
        "counting(len(work)) if step.plain else _sample_rows(work, q_start)",
        "counting(len(work))",
    ),
    Mutant(
        "a page table ends where a page begins",
        BATCH,
        "[-(-end // page_size) for end in ends]",
        "[-(-(end - 1) // page_size) for end in ends]",
    ),
    Mutant(
        "a step forgets when to quantize",
        BATCH,
        "        quantize_after=_quantize_after(work),\n",
        "",
    ),
    Mutant(
        "a step has one group",
        BATCH,
        "groups=tuple(map(in_group, range(_num_groups(work)))),",
        "groups=(in_group(0),),",
    ),
    Mutant(
        "two decodes may write one slot",
        BATCH,
        "len(set(numbers))",
        "len(numbers)",
    ),
    Mutant(
        "a chunk is taken for a decode",
        BATCH,
        "sum(ends) - sum(firsts) == len(work)",
        "sum(ends) - sum(firsts) >= len(work)",
    ),
    Mutant("numbers that steps share can be written to", BATCH, "numbers.setflags(write=False)", "pass"),
    # replayed steps
    Mutant(
        "steps of any shape replay the first",
        REPLAY,
        "key = build, tuple(value.shape for value in host)",
        "key = build",
    ),
    Mutant(
        "steps of other pages replay the first",
        REPLAY,
        "key = build, tuple(value.shape for value in host)",
        "key = build, tuple(value.shape for value in values)",
    ),
    Mutant(
        "steps that want other results replay the first",
        REPLAY,
        "key = build, tuple(value.shape for value in host)",
        "key = tuple(value.shape for value in host)",
    ),
    Mutant(
        "the pages' indices stay those of the first step",
        REPLAY,
        "*(array for mine, count in zip(own, counts, strict=True) for array in mine[:count]),",
        "*(mx.array(array) for mine, count in zip(own, counts, strict=True) for array in mine[:count]),",
    ),
    Mutant(
        "a recording leaves its own arrays bound",
        REPLAY,
        "(str(error)) from None\n        finally:\n            _bind(pools, inputs)",
        "(str(error)) from None",
    ),
    Mutant(
        "flags of a replayed step are lost",
        REPLAY,
        "        self._program.run(host)\n"
        "        for pool, written in zip(self._pools, self._pending, strict=True):\n"
        "            pool.bind_pending(written)\n",
        "        self._program.run(host)\n",
    ),
    Mutant(
        "every program has its own memory",
        REPLAY,
        "return CapturedStep(self._pools, self._programs, build, values)",
        "return CapturedStep(self._pools, self._pools[0].programs(), build, values)",
    ),
    Mutant(
        "no program is ever recorded",
        REPLAY,
        "            return CapturedStep(",
        "            raise CannotCapture(",
    ),
    # the pool of the native kernels
    Mutant(
        "a step has the indices of the one before", BACKEND, "        self._step = None\n", "        pass\n"
    ),
    Mutant(
        "pages outside of the pool reach the kernels",
        BACKEND,
        "if not _is_inside(metadata, group, self._spec.num_pages):",
        "if False:",
    ),
    # weights
    Mutant("tensors begin where their header ends, less its length", MAPPED, "8 + length +", "length +"),
    Mutant(
        "weights that were not packed stay in the file",
        NATIVE_OPS,
        "model.update(tree_map(_ext.copy_of, model.parameters()))",
        "pass",
    ),
    Mutant(
        "empty tensors are mapped",
        MAPPED,
        'tensor["dtype"] in _DTYPES and 0 not in tensor["shape"]',
        'tensor["dtype"] in _DTYPES',
    ),
    # steps in flight
    Mutant(
        "penalties do not wait for the token",
        OVERLAP,
        "not _guesses(sample) and sample.state.is_foreseen",
        "not _guesses(sample)",
    ),
    Mutant(
        "drafts do not wait for the token",
        OVERLAP,
        "not _guesses(sample) and sample.state.is_foreseen",
        "sample.state.is_foreseen",
    ),
    # states after drafts
    Mutant(
        "the state after a draft stands a token later",
        STATES,
        "state.drafted += [(stop + index, self",
        "state.drafted += [(stop + index + 1, self",
    ),
    Mutant(
        "a sequence goes on from the state after its last draft",
        STATES,
        "if position == table.num_written:",
        "if False:",
    ),
    Mutant(
        "snapshots behind wrong drafts stay planned",
        STATES,
        "self._drop_planned(state, behind=table.num_written)",
        "self._drop_planned(state, behind=2**30)",
    ),
    Mutant(
        "a state is copied to one slot only",
        SEGMENTS,
        "for slot in segment.copies]",
        "for slot in segment.copies[:1]]",
    ),
    Mutant(
        "rows of a wrong token are believed",
        DEVICE_STEP,
        "return RunOutput(with_failures(in_order, self._batch, failed), tuple(failed), void=void)",
        "return RunOutput(with_failures(in_order, self._batch, failed), tuple(failed))",
    ),
    Mutant(
        "a wrong token is followed on",
        DEVICE_STEP,
        "return self._feeds and not self._void()",
        "return self._feeds",
    ),
    Mutant(
        "a device is sure of every sum",
        DEVICE_SAMPLING,
        "return 2 * ((min(size, BLOCK) + -(-size // BLOCK)) * ROUNDING + 2.0**-18)",
        "return 0.0 * size",
    ),
    Mutant(
        "of equal logits the nucleus keeps the last",
        DEVICE_SAMPLING,
        "place <= index - first + 1",
        "place > behind - index - 1",
    ),
)
