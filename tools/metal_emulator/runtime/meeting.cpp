// Operations at which threads wait for each other (simdgroup operations, barriers), and threadgroup memory.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "machine.h"

namespace msl {
namespace {

constexpr char kSimdgroupBarrier[] = "simdgroup_barrier", kThreadgroupBarrier[] = "threadgroup_barrier";

void make_ready(Fiber& fiber) {
  fiber.state = State::kReady;
  machine.simdgroups[fiber.simdgroup].ready.push_back(static_cast<uint16_t>(fiber.lane));
}

void count_operation(const char* name) {
  MslLaunch& launch = *machine.launch;
  uint32_t i = 0;
  while (i < launch.num_operations && strcmp(launch.operations[i].name, name)) ++i;
  if (i == kMslMaxOperations) return;  // more names than the shim has
  MslOperation& operation = launch.operations[i];
  if (i == launch.num_operations) {
    snprintf(operation.name, sizeof operation.name, "%s", name);
    launch.num_operations++;
  }
  operation.executions++;
}

bool same_operation(const Fiber& a, const Fiber& b) {
  return a.line == b.line && !strcmp(a.operation, b.operation);
}

void report_divergence(Fiber& lane, const Fiber& other) {
  Fiber* running = machine.current;
  machine.current = &lane;
  report(true, 0, 0, lane.line,
         "divergent simdgroup operation: lane %u is at %s (line %d) but lane %u is at %s (line %d)",
         lane.lane, lane.operation, lane.line, other.lane, other.operation, other.line);
  machine.current = running;
}

}  // namespace

// Releases the waiting lanes if all live lanes wait (or, with allow_subset, if some wait). If strict, all
// must wait at the same operation. Otherwise only lanes at the operation that is first in the source are
// released, because they may reach the operation of other lanes later. Returns whether any lane was released.
bool release_simdgroup(uint32_t index, bool allow_subset) {
  Simdgroup& simdgroup = machine.simdgroups[index];
  if (simdgroup.num_waiting == 0) return false;
  if (simdgroup.num_waiting != simdgroup.num_live && !allow_subset) return false;
  const uint32_t num_lanes = std::min(kLanes, machine.num_threads - index * kLanes);
  Fiber* lanes = &machine.fibers[index * kLanes];
  const bool is_strict = machine.launch->strict;
  const Fiber* first = nullptr;
  for (uint32_t i = 0; i < num_lanes; ++i) {
    if (lanes[i].state != State::kAtSimdgroup) continue;
    if (!first || (!is_strict && lanes[i].line < first->line)) first = &lanes[i];
  }
  uint32_t together = 0;
  for (uint32_t i = 0; i < num_lanes; ++i) {
    if (lanes[i].state != State::kAtSimdgroup) continue;
    if (same_operation(lanes[i], *first)) {
      together |= 1u << i;
    } else if (is_strict) {
      report_divergence(lanes[i], *first);
      return false;
    }
  }
  if (!strcmp(first->operation, kSimdgroupBarrier)) {
    if (first->flags & kMemThreadgroup) simdgroup.threadgroup_epoch++;
    if (first->flags & kMemDevice) simdgroup.device_epoch++;
  }
  count_operation(first->operation);
  flush_traffic(index);
  simdgroup.active = together;
  memcpy(simdgroup.exchanged, simdgroup.brought, sizeof simdgroup.exchanged);
  for (uint32_t i = 0; i < num_lanes; ++i) {
    if (!(together >> i & 1)) continue;
    simdgroup.num_waiting--;
    make_ready(lanes[i]);
  }
  return true;
}

void release_barrier() {
  const Fiber* first = nullptr;
  for (Fiber& fiber : machine.fibers) {
    if (fiber.state != State::kAtBarrier) continue;
    if (!first) first = &fiber;
    if (fiber.line == first->line) continue;
    machine.current = &fiber;
    report(true, 0, 0, fiber.line,
           "divergent threadgroup_barrier: thread %u waits at line %d, thread %u at line %d", fiber.thread,
           fiber.line, first->thread, first->line);
    return;
  }
  count_operation(kThreadgroupBarrier);
  if (first->flags & kMemThreadgroup) machine.threadgroup_epoch++;
  if (first->flags & kMemDevice) machine.device_epoch++;
  for (uint32_t i = 0; i < machine.simdgroups.size(); ++i) flush_traffic(i);
  for (Fiber& fiber : machine.fibers) {
    if (fiber.state == State::kAtBarrier) make_ready(fiber);
  }
  machine.num_at_barrier = 0;
}

// Reports a deadlock, with the number of threads that wait at each operation.
void report_deadlock() {
  struct Place {
    const Fiber* example;
    uint32_t num_threads;
  };
  std::vector<Place> places;
  for (const Fiber& fiber : machine.fibers) {
    const auto same = [&](const Place& place) {
      const bool is_done = fiber.state == State::kDone;
      return place.example->state == fiber.state && (is_done || same_operation(*place.example, fiber));
    };
    const auto found = std::find_if(places.begin(), places.end(), same);
    if (found == places.end()) {
      places.push_back({&fiber, 1});
    } else {
      found->num_threads++;
    }
  }
  char text[360];
  size_t length = static_cast<size_t>(
      snprintf(text, sizeof text, "deadlock (divergent barrier or simdgroup operation):"));
  int line = 0;
  for (const Place& place : places) {
    if (length >= sizeof text - 1) break;
    const Fiber& fiber = *place.example;
    const size_t room = sizeof text - length;
    const bool is_done = fiber.state == State::kDone;
    if (!is_done && line == 0) line = fiber.line;
    length += static_cast<size_t>(
        is_done ? snprintf(text + length, room, " %u threads (e.g. %u) returned;", place.num_threads,
                           fiber.thread)
                : snprintf(text + length, room, " %u threads (e.g. %u) wait at %s line %d;",
                           place.num_threads, fiber.thread, fiber.operation, fiber.line));
  }
  machine.current = nullptr;
  report(true, 0, 0, line, "%s", text);
}

namespace {

MslGather meet(const void* value, uint32_t size, const char* operation, int line, uint32_t flags) {
  Fiber* fiber = machine.current;
  Simdgroup& simdgroup = machine.simdgroups[fiber->simdgroup];
  machine.launch->num_gathers++;
  memcpy(simdgroup.brought + kMslGatherStride * fiber->lane, value, size);
  fiber->operation = operation;
  fiber->line = line;
  fiber->flags = flags;
  fiber->state = State::kAtSimdgroup;
  simdgroup.num_waiting++;
  release_simdgroup(fiber->simdgroup, false);
  if (machine.is_aborted) leave();
  to_scheduler();
  if (machine.is_aborted) leave();
  return {simdgroup.exchanged, simdgroup.active, fiber->lane};
}

void wait_at_barrier(uint32_t flags, int line) {
  Fiber* fiber = machine.current;
  machine.launch->num_barriers++;
  fiber->operation = kThreadgroupBarrier;
  fiber->line = line;
  fiber->flags = flags;
  fiber->state = State::kAtBarrier;
  const uint32_t expected = machine.launch->strict ? machine.num_threads : machine.num_live;
  if (++machine.num_at_barrier == expected) release_barrier();
  machine.current = fiber;
  if (machine.is_aborted) leave();
  to_scheduler();
  if (machine.is_aborted) leave();
}

}  // namespace
}  // namespace msl

using msl::machine;

extern "C" MslGather msl_rt_gather(const void* value, uint32_t size, const char* operation, int line) {
  return msl::meet(value, size, operation, line, 0);
}

extern "C" void msl_rt_barrier(int is_simdgroup, uint32_t flags, int line) {
  if (is_simdgroup) {
    const char nothing = 0;
    msl::meet(&nothing, 1, msl::kSimdgroupBarrier, line, flags);
  } else {
    msl::wait_at_barrier(flags, line);
  }
}

extern "C" void msl_rt_fail(const char* message, int line) {
  msl::report(true, 0, 0, line, "%s", message);
  msl::leave();
}

// Returns the variable of a declaration for this threadgroup; accesses to gaps between variables are errors.
extern "C" void* msl_rt_threadgroup_memory(const char* name, uint32_t size, int line) {
  constexpr uint32_t kAlignment = 16, kGuardBytes = 64;
  const auto round_up = [](uint32_t n) { return (n + kAlignment - 1) & ~(kAlignment - 1); };
  for (const msl::ThreadgroupVariable& seen : machine.variables) {
    if (seen.line == line && seen.size == size && !strcmp(seen.name, name)) return seen.address;
  }
  machine.threadgroup_bytes += round_up(size);
  machine.launch->threadgroup_bytes = std::max(machine.launch->threadgroup_bytes, machine.threadgroup_bytes);
  const uint32_t offset = round_up(machine.arena_used + kGuardBytes);
  if (machine.threadgroup_bytes > msl::kMaxThreadgroupBytes || offset + size > msl::kArenaBytes) {
    msl::report(true, 0, 0, line, "threadgroup memory: %u bytes exceed Apple's limit of %u",
                machine.threadgroup_bytes, msl::kMaxThreadgroupBytes);
    msl::leave();
  }
  uint8_t* address = machine.arena + offset;
  const auto begin = reinterpret_cast<uint64_t>(address);
  machine.variables.push_back({name, line, size, address});
  machine.arena_used = offset + size;
  msl::Cell* shadow = machine.arena_shadow ? machine.arena_shadow + offset : nullptr;
  machine.regions.push_back(
      {begin, begin + size, name, shadow, nullptr, msl::Region::kNoBuffer, false, {}, {}});
  machine.last_region = nullptr;
  return address;
}
