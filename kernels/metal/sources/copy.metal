// Copies codes and scales of pages inside the pool. One threadgroup copies the rows of one KV head, which are
// contiguous in a page, for one pair of pages.
//   pairs [>= P, 2]: (source, target); no page is both source and target  ->  copied [P * KV heads * 8]
// The kernel writes to inputs: each array of the pool is passed twice, for reading and as `to_...` for
// writing. MLX does not know of these writes. So the next kernel that reads or writes the pages takes
// `copied` as an input, and this kernel takes `after`, the output of the last kernel on these pages.

template <typename T>
METAL_FUNC void copy_run(const device T* part, device T* to, uint words, ulong source, ulong target, uint first) {
  const device WORD* const from_words = (const device WORD*)part + source * words;
  device WORD* const to_words = (device WORD*)to + target * words;
  for (uint i = first; i < words; i += THREADS) {
    to_words[i] = from_words[i];
  }
}
//! body
const uint pair = threadgroup_position_in_grid.x, kv_head = threadgroup_position_in_grid.y;
const uint first = thread_index_in_threadgroup;
const ulong source = ulong(uint(pairs[2 * pair])) * NUM_KV_HEADS + kv_head;
const ulong target = ulong(uint(pairs[2 * pair + 1])) * NUM_KV_HEADS + kv_head;
copy_run(k_codes, (device Keys::Code*)to_k_codes, KEY_CODE_WORDS, source, target, first);
copy_run(v_codes, (device Values::Code*)to_v_codes, VALUE_CODE_WORDS, source, target, first);
#if KEY_SCALE_WORDS
copy_run(k_scales, (device Keys::Scale*)to_k_scales, KEY_SCALE_WORDS, source, target, first);
#endif
#if VALUE_SCALE_WORDS
copy_run(v_scales, (device Values::Scale*)to_v_scales, VALUE_SCALE_WORDS, source, target, first);
#endif
if (first < 8) {
  copied[(pair * NUM_KV_HEADS + kv_head) * 8 + first] = true;
}
