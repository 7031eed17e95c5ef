"""Bugs in what a step is built from, in graphs that are replayed, and in how weights leave their files."""

from __future__ import annotations

from mutant import bug

MUTANTS = (
    # decode steps, which are built from one number of each sequence
    bug(
        "a decode step writes to the last page",
        "slots.append(held[last] * page_size + position % page_size)",
        "slots.append(held[-1] * page_size + position % page_size)",
    ),
    bug(
        "a decode step reads and writes the first group's pages in every group",
        "held, last = tables[row].parts[group].pages, position // page_size",
        "held, last = tables[row].parts[0].pages, position // page_size",
    ),
    bug(
        "a step reads and writes the first group's pages in every group",
        "np.frombuffer(table.parts[group].pages, np.int32, used)",
        "np.frombuffer(table.parts[0].pages, np.int32, used)",
    ),
    bug("a decode step does not see its own token", "lengths.append(start + 1)", "lengths.append(start)"),
    bug(
        "the last token of a prompt is a plain decode",
        "if sequence.drafts or sequence.parallel_samples or start < sequence.num_prompt:",
        "if sequence.drafts or sequence.parallel_samples:",
    ),
    bug("a step does not see its own tokens", "kv_len=stops,", "kv_len=starts,"),
    bug(
        "a step draws once for all parallel samples, and for everybody",
        "_token_ids(work), _sample_rows(work, q_start)",
        "_token_ids(work), counting(len(work))",
    ),
    bug(
        "a page table ends where a page begins",
        "[-(-end // page_size) for end in ends]",
        "[-(-(end - 1) // page_size) for end in ends]",
    ),
    bug(
        "a step forgets when to quantize",
        "np.where(positions < spec.quantize_after, 0, first) if",
        "first if",
    ),
    bug(
        "a step has one group",
        "_with_starts(map(in_group, range(len(tables[0].parts)))",
        "_with_starts(map(in_group, range(1))",
    ),
    bug("two decodes may write one slot", "len(set(slots))", "len(slots)"),
    bug(
        "a chunk is taken for a decode",
        "== 1 and not (item.parallel_samples or item.drafts)",
        ">= 1 and not (item.parallel_samples or item.drafts)",
    ),
    bug("numbers that steps share can be written to", "numbers.setflags(write=False)", "pass"),
    # replayed steps
    bug(
        "steps of any shape replay the first",
        "key = build, *shapes",
        "key = build",
    ),
    bug(
        "steps of other pages replay the first",
        "shapes.append(pool.step_shape)",
        "pass",
    ),
    bug(
        "steps that want other results replay the first",
        "key = build, *shapes",
        "key = (*shapes,)",
    ),
    bug(
        "the pages' indices stay those of the first step",
        "*(array for mine, count in zip(own, counts, strict=True) for array in mine[:count]),",
        "*(mx.array(array) for mine, count in zip(own, counts, strict=True) for array in mine[:count]),",
    ),
    bug(
        "a capture leaves its own arrays bound",
        "(str(error)) from None\n        finally:\n            _bind(pools, inputs)",
        "(str(error)) from None",
    ),
    bug(
        "flags of a replayed step are lost",
        "        self._program.run(host)\n"
        "        for pool, written in self._pending:\n"
        "            pool.bind_pending(written)\n",
        "        self._program.run(host)\n",
    ),
    bug(
        "every program has its own memory",
        "return CapturedStep(self._pools, self._programs, build, values)",
        "return CapturedStep(self._pools, self._pools[0].programs(), build, values)",
    ),
    bug(
        "no program is ever recorded", "            return CapturedStep(", "            raise CannotCapture("
    ),
    # the pool of the native kernels
    bug("a step has the indices of the one before", "        self._step = None\n", "        pass\n"),
    bug(
        "pages outside of the pool reach the kernels",
        "        if not _ext.pack_indices(",
        "if False:",
    ),
    # weights
    bug(
        "tensors begin where their header ends, less its length",
        "file.view(8 + length +",
        "file.view(length +",
    ),
    bug(
        "weights that were not packed stay in the file",
        "model.update(tree_map(_ext.copy_of, model.parameters()))",
        "pass",
    ),
    bug(
        "empty tensors are mapped",
        'tensor["dtype"] in _DTYPES and 0 not in tensor["shape"]',
        'tensor["dtype"] in _DTYPES',
    ),
    # steps in flight
    bug(
        "penalties do not wait for the token",
        "sample.state.is_foreseen for sample in going_on",
        "True for sample in going_on",
    ),
    bug(
        "drafts do not wait for the token",
        "all(part.may_overlap(going_on) for part in parts.live()) and all(",
        "all(",
    ),
    # states after drafts
    bug(
        "the state after a draft stands a token later",
        "state.drafted += [(stop + index, self",
        "state.drafted += [(stop + index + 1, self",
    ),
    bug(
        "a sequence goes on from the state after its last draft",
        "if position == table.num_written:",
        "if False:",
    ),
    bug(
        "snapshots behind wrong drafts stay planned",
        "self._drop_planned(state, behind=table.num_written)",
        "self._drop_planned(state, behind=2**30)",
    ),
    bug(
        "a state is copied to one slot only", "for slot in segment.copies]", "for slot in segment.copies[:1]]"
    ),
    bug(
        "rows of a wrong token are believed",
        "return RunOutput(with_failures(in_order, self._batch, failed), tuple(failed), void=void)",
        "return RunOutput(with_failures(in_order, self._batch, failed), tuple(failed))",
    ),
    bug("a wrong token is followed on", "return self._feeds and not self._void()", "return self._feeds"),
    bug(
        "a device is sure of every sum",
        "return 2 * ((min(size, BLOCK) + -(-size // BLOCK)) * ROUNDING + 2.0**-18)",
        "return 0.0 * size",
    ),
    bug(
        "of equal logits the nucleus keeps the last",
        "place <= index - first + 1",
        "place > behind - index - 1",
    ),
)
