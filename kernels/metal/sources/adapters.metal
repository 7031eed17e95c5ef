// Common parts of both kernels of adapters. A simdgroup or thread computes ROWS rows; rows that share a slot
// share each load of a factor. A row's sums are in the same order either way, so its bits do not depend on
// its neighbours.
//    slots [T]: the slot of each row's adapter, 0 for none
//    places [slots + 1, PARTS, 4]: first row of the part's factor in `a` and in its `b`, rank, whether it has
//    gains

#define UNROLL _Pragma("clang loop unroll(full)")

// Returns whether rows [first, first + count) are in one slot.
METAL_FUNC bool share_slot(const device int* slots, int first, int count) {
  bool same = true;
  for (int r = 1; r < count; ++r) {
    same = same && slots[first + r] == slots[first];
  }
  return same;
}

METAL_FUNC const device int* place_of(const device int* places, int slot, uint part) {
  return places + (uint(slot) * PARTS + part) * 4;
}
