// Pages copied onto pages inside the pool, codes and scales of K and V: one threadgroup per pair and
// KV head, whose rows of a page are one run of words.
//   pairs [>= P, 2]: (source, target); no page of one launch is both  ->  copied [P * KV heads * 8]
// Each part is an input twice, once to read and once, as `to_...`, to be written all the same. MLX does
// not see that: whoever reads or writes the pages next takes `copied` as an input, and `after` is what the
// last kernel on these pages made.

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
