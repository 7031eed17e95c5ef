// Checks of every access of an instrumented kernel: bounds, ownership, initialisation, races.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "machine.h"

namespace msl {

// Reports a message once per place in the code; a fatal one ends the launch.
void report(bool is_fatal, uint64_t pc, uint64_t other_pc, int line, const char* format, ...) {
  MslLaunch& launch = *machine.launch;
  const uint64_t place = pc ? pc - machine.image_begin : 0;
  const uint64_t other_place = other_pc ? other_pc - machine.image_begin : 0;
  if (is_fatal) machine.is_aborted = true;
  for (uint32_t i = 0; i < launch.num_reports && !is_fatal; ++i) {
    const MslReport& seen = launch.reports[i];
    if (seen.pc == place && seen.other_pc == other_place && seen.line == line) return;
  }
  if (launch.num_reports == launch.max_reports) return;
  constexpr int kRoomForThread = 100;
  MslReport& entry = launch.reports[launch.num_reports++];
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(entry.text, sizeof entry.text - kRoomForThread, format, arguments);
  va_end(arguments);
  length = std::min(length, static_cast<int>(sizeof entry.text) - kRoomForThread - 1);
  if (const Fiber* fiber = machine.current) {
    const uint32_t* group = machine.group_position;
    snprintf(entry.text + length, kRoomForThread,
             " [thread %u simdgroup %u lane %u of threadgroup (%u,%u,%u)]", fiber->thread, fiber->simdgroup,
             fiber->lane, group[0], group[1], group[2]);
  }
  entry.pc = place;
  entry.other_pc = other_place;
  entry.line = line;
  entry.is_fatal = is_fatal;
}

namespace {

using Bytes = unsigned long long;  // printf's %llu

Region* find_region(uint64_t address) {
  Region* last = machine.last_region;
  if (last && address >= last->begin && address < last->end) return last;
  for (Region& region : machine.regions) {
    if (address >= region.begin && address < region.end) return machine.last_region = &region;
  }
  return nullptr;
}

const Region* nearest_region(uint64_t address) {
  const Region* nearest = nullptr;
  uint64_t distance = kGap;
  for (const Region& region : machine.regions) {
    const uint64_t d = address < region.begin ? region.begin - address : address - region.end;
    if (d < distance) {
      distance = d;
      nearest = &region;
    }
  }
  return nearest;
}

[[noreturn]] void out_of_bounds(uint64_t address, uint64_t size, bool is_write, uint64_t pc) {
  const char* verb = is_write ? "write" : "read";
  if (const Region* region = nearest_region(address)) {
    report(true, pc, 0, 0, "out-of-bounds %s of %llu bytes at byte offset %lld of '%s' (%llu bytes)", verb,
           Bytes{size}, static_cast<long long>(address - region->begin), region->name,
           Bytes{region->end - region->begin});
  } else {
    report(true, pc, 0, 0, "wild %s of %llu bytes", verb, Bytes{size});
  }
  leave();
}

const char* kind_name(const Region& region) {
  return region.is_threadgroup() ? "threadgroup memory" : "output";
}

struct Now {  // position of the accessing thread in the order of accesses
  uint32_t group, epoch;
  uint16_t simd_epoch, thread;
  uint32_t simdgroup;
};

// A barrier orders accesses by threads of one threadgroup; a simdgroup_barrier orders accesses by lanes of one
// simdgroup. Accesses by different threadgroups are never ordered.
bool follows_unordered_write(const Cell& cell, const Now& now) {
  if (cell.write_group == 0) return false;
  if (cell.write_group != now.group) return true;
  if (cell.write_epoch != now.epoch || cell.write_thread == now.thread) return false;
  const bool same_simdgroup = machine.fibers[cell.write_thread].simdgroup == now.simdgroup;
  return !same_simdgroup || cell.write_simd_epoch == now.simd_epoch;
}

bool follows_unordered_read(const Cell& cell, const Now& now) {
  if (cell.read_group == 0) return false;
  if (cell.read_group != now.group) return true;
  if (cell.read_epoch != now.epoch) return false;
  if (cell.read_by_many_simdgroups) return true;
  if (machine.fibers[cell.read_thread].simdgroup != now.simdgroup) return true;
  const bool other_lane = cell.read_by_many_lanes || cell.read_thread != now.thread;
  return cell.read_simd_epoch == now.simd_epoch && other_lane;
}

void note_write(Cell& cell, const Now& now, uint64_t pc, bool is_atomic) {
  cell.is_initialised = true;
  cell.write_group = now.group;
  cell.write_epoch = now.epoch;
  cell.write_thread = now.thread;
  cell.write_simd_epoch = now.simd_epoch;
  cell.write_pc = pc;
  cell.write_was_atomic = is_atomic;
}

void note_read(Cell& cell, const Now& now, uint64_t pc) {
  if (cell.read_group != now.group || cell.read_epoch != now.epoch) {
    cell.read_by_many_lanes = cell.read_by_many_simdgroups = false;
  } else {
    if (machine.fibers[cell.read_thread].simdgroup != now.simdgroup) cell.read_by_many_simdgroups = true;
    if (cell.read_simd_epoch != now.simd_epoch) {
      cell.read_by_many_lanes = false;
    } else if (cell.read_thread != now.thread) {
      cell.read_by_many_lanes = true;
    }
  }
  cell.read_group = now.group;
  cell.read_epoch = now.epoch;
  cell.read_thread = now.thread;
  cell.read_simd_epoch = now.simd_epoch;
  cell.read_pc = pc;
}

void check_byte(Cell& cell, const Region& region, uint64_t offset, const Now& now, bool is_write, uint64_t pc,
                bool is_atomic) {
  if (region.is_threadgroup() && cell.generation != machine.generation) {
    cell = Cell{};
    cell.generation = machine.generation;
  }
  const char* kind = kind_name(region);
  if (!is_write && !cell.is_initialised) {
    report(false, pc, 0, 0, "read of uninitialised %s '%s' byte offset %llu", kind, region.name,
           Bytes{offset});
  }
  if (follows_unordered_write(cell, now) && !(is_atomic && cell.write_was_atomic)) {
    report(false, pc, cell.write_pc, 0,
           "data race on %s '%s' byte offset %llu: %s after unordered write by thread %u%s", kind,
           region.name, Bytes{offset}, is_write ? "write" : "read", cell.write_thread,
           cell.write_group != now.group ? " of another threadgroup" : "");
  }
  if (is_write && !is_atomic && follows_unordered_read(cell, now)) {
    report(false, pc, cell.read_pc, 0,
           "data race on %s '%s' byte offset %llu: write after unordered read by thread %u", kind,
           region.name, Bytes{offset}, cell.read_thread);
  }
  if (is_write) {
    note_write(cell, now, pc, is_atomic);
  } else {
    note_read(cell, now, pc);
  }
}

void check_owned(const Region& region, uint64_t offset, uint64_t size, uint64_t pc) {
  for (uint64_t i = offset; i < offset + size; ++i) {
    if (region.valid[i]) continue;
    report(true, pc, 0, 0, "read of a byte the host marked invalid: '%s' byte offset %llu", region.name,
           Bytes{i});
    leave();
  }
}

}  // namespace

void access(uint64_t address, uint64_t size, bool is_write, uint64_t pc, bool is_atomic) {
  machine.launch->num_accesses++;
  const Fiber* fiber = machine.current;
  if (!fiber || size == 0) return;
  check_time();
  const auto stack = reinterpret_cast<uint64_t>(fiber->stack);
  if (address >= stack && address < stack + kStackBytes) return;
  Region* region = find_region(address);
  const bool in_image = address >= machine.image_begin && address + size <= machine.image_end;
  if (!region && in_image && !is_write) return;  // a constant table of the kernel
  if (!region || address + size > region->end) out_of_bounds(address, size, is_write, pc);
  const uint64_t offset = address - region->begin;
  if (is_write && region->is_read_only) {
    report(true, pc, 0, 0, "write to read-only input '%s'", region->name);
    leave();
  }
  if (region->valid && !is_write) check_owned(*region, offset, size, pc);
  if (!region->is_threadgroup()) record_traffic(*region, offset, size, is_write, pc);
  if (!region->shadow) return;
  const Simdgroup& simdgroup = machine.simdgroups[fiber->simdgroup];
  const bool is_local = region->is_threadgroup();
  const Now now = {machine.group_index + 1, is_local ? machine.threadgroup_epoch : machine.device_epoch,
                   static_cast<uint16_t>(is_local ? simdgroup.threadgroup_epoch : simdgroup.device_epoch),
                   static_cast<uint16_t>(fiber->thread), fiber->simdgroup};
  for (uint64_t i = offset; i < offset + size; ++i) {
    check_byte(region->shadow[i], *region, i, now, is_write, pc, is_atomic);
  }
}

void describe_fault(uint64_t address) {
  if (const Region* region = nearest_region(address)) {
    report(true, 0, 0, 0, "access fault (guard page) at byte offset %lld of '%s' (%llu bytes)",
           static_cast<long long>(address - region->begin), region->name, Bytes{region->end - region->begin});
  } else {
    report(true, 0, 0, 0, "access fault far from every buffer");
  }
}

}  // namespace msl
