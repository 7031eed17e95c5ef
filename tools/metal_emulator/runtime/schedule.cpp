// Threads of a threadgroup, and which of them runs next.
#include <algorithm>
#include <cstring>

#include "machine.h"

namespace msl {
namespace {

// ---- threads of a threadgroup ---------------------------------------------------------------------------

void run_thread() {
  Fiber* fiber = machine.current;
  msl_entry(machine.buffers, &fiber->ids);
  fiber->state = State::kDone;
  machine.num_live--;
  Simdgroup& simdgroup = machine.simdgroups[fiber->simdgroup];
  simdgroup.num_live--;
  if (simdgroup.num_waiting && simdgroup.num_waiting == simdgroup.num_live) {
    release_simdgroup(fiber->simdgroup, false);
  }
  const bool is_last_to_wait = machine.num_at_barrier && machine.num_at_barrier == machine.num_live;
  if (!machine.launch->strict && is_last_to_wait) release_barrier();
  leave();
}

void set_ids(MslIds& ids, uint32_t thread, const uint32_t size[3]) {
  const MslLaunch& launch = *machine.launch;
  const uint32_t position[3] = {thread % size[0], thread / size[0] % size[1], thread / (size[0] * size[1])};
  ids = MslIds{};
  for (int d = 0; d < 3; ++d) {
    const uint32_t asked = launch.threadgroup[d], group = machine.group_position[d];
    ids.thread_position_in_threadgroup[d] = position[d];
    ids.threadgroup_position_in_grid[d] = group;
    ids.thread_position_in_grid[d] = group * asked + position[d];
    ids.threads_per_threadgroup[d] = size[d];
    ids.dispatch_threads_per_threadgroup[d] = asked;
    ids.threadgroups_per_grid[d] = (launch.grid[d] + asked - 1) / asked;
    ids.threads_per_grid[d] = ids.grid_size[d] = launch.grid[d];
  }
  const uint32_t asked = launch.threadgroup[0] * launch.threadgroup[1] * launch.threadgroup[2];
  ids.thread_index_in_threadgroup = thread;
  ids.thread_index_in_simdgroup = thread % kLanes;
  ids.simdgroup_index_in_threadgroup = thread / kLanes;
  ids.simdgroups_per_threadgroup = (machine.num_threads + kLanes - 1) / kLanes;
  ids.dispatch_simdgroups_per_threadgroup = (asked + kLanes - 1) / kLanes;
  ids.threads_per_simdgroup = ids.thread_execution_width = kLanes;
  ids.thread_index_in_quadgroup = thread % 4;
  ids.quadgroup_index_in_threadgroup = thread / 4;
  ids.quadgroups_per_threadgroup = (machine.num_threads + 3) / 4;
  ids.dispatch_quadgroups_per_threadgroup = ids.dispatch_simdgroups_per_threadgroup * 8;
}

void start_threadgroup() {
  const MslLaunch& launch = *machine.launch;
  uint32_t size[3];
  for (int d = 0; d < 3; ++d) {  // threadgroups at the edge of the grid are smaller
    size[d] =
        std::min(launch.threadgroup[d], launch.grid[d] - machine.group_position[d] * launch.threadgroup[d]);
  }
  machine.num_threads = machine.num_live = size[0] * size[1] * size[2];
  machine.num_at_barrier = 0;
  machine.generation++;
  machine.threadgroup_epoch++;
  machine.device_epoch++;
  machine.variables.clear();
  machine.arena_used = machine.threadgroup_bytes = 0;
  while (!machine.regions.empty() && machine.regions.back().is_threadgroup()) machine.regions.pop_back();
  machine.last_region = nullptr;
  memset(machine.arena, 0xFF, kArenaBytes);  // NaN in every float type

  machine.fibers.resize(machine.num_threads);
  machine.simdgroups.resize((machine.num_threads + kLanes - 1) / kLanes);
  for (uint32_t i = 0; i < machine.simdgroups.size(); ++i) {
    Simdgroup& simdgroup = machine.simdgroups[i];
    simdgroup.num_live = std::min(kLanes, machine.num_threads - i * kLanes);
    simdgroup.num_waiting = 0;
    simdgroup.threadgroup_epoch = simdgroup.device_epoch = 0;
    simdgroup.ready.clear();
  }
  for (uint32_t thread = 0; thread < machine.num_threads; ++thread) {
    Fiber& fiber = machine.fibers[thread];
    fiber.thread = thread;
    fiber.simdgroup = thread / kLanes;
    fiber.lane = thread % kLanes;
    fiber.state = State::kReady;
    fiber.operation = "";
    fiber.line = 0;
    fiber.stack = machine.stacks + uint64_t{thread} * kStackBytes;
    fiber.stack_pointer = initial_stack_pointer(fiber.stack, run_thread);
    set_ids(fiber.ids, thread, size);
    machine.simdgroups[fiber.simdgroup].ready.push_back(static_cast<uint16_t>(fiber.lane));
  }
}

// ---- scheduler ------------------------------------------------------------------------------------------

// Returns the simdgroup that runs next, or -1. Greedy and reverse schedules stay with one that can run.
int next_simdgroup(uint32_t mode, uint32_t last, uint32_t rotation) {
  const auto count = static_cast<uint32_t>(machine.simdgroups.size());
  const bool stays = mode == kGreedy || mode == kReverse;
  if (stays && !machine.simdgroups[last].ready.empty()) return static_cast<int>(last);
  uint32_t start = 0;
  if (mode == kRandom) start = static_cast<uint32_t>(machine.random() % count);
  if (mode == kGreedy) start = (rotation + last) % count;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t candidate = mode == kReverse ? count - 1 - i : (start + i) % count;
    if (!machine.simdgroups[candidate].ready.empty()) return static_cast<int>(candidate);
  }
  return -1;
}

uint32_t take_lane(Simdgroup& simdgroup, uint32_t mode) {
  std::vector<uint16_t>& ready = simdgroup.ready;
  const size_t index = mode == kInOrder ? 0 : machine.random() % ready.size();
  const uint32_t lane = ready[index];
  if (mode == kInOrder) {
    ready.erase(ready.begin());
  } else {
    ready[index] = ready.back();
    ready.pop_back();
  }
  return lane;
}

bool release_any_subset() {
  for (uint32_t i = 0; i < machine.simdgroups.size(); ++i) {
    if (release_simdgroup(i, true)) return true;
  }
  return false;
}

void run_threadgroup() {
  start_threadgroup();
  const uint32_t schedule = machine.launch->schedule;
  const uint32_t mode = schedule == kMixed ? kRandom + machine.random() % 3 : schedule;
  const auto rotation = static_cast<uint32_t>(machine.random());
  const auto count = static_cast<uint32_t>(machine.simdgroups.size());
  uint32_t simdgroup = mode == kReverse ? count - 1 : mode == kGreedy ? rotation % count : 0;
  while (machine.num_live && !machine.is_aborted) {
    if (machine.is_out_of_time) {
      report_timeout();
      break;
    }
    const int next = next_simdgroup(mode, simdgroup, rotation);
    if (next < 0) {
      if (!machine.launch->strict && release_any_subset()) continue;
      report_deadlock();
      break;
    }
    simdgroup = static_cast<uint32_t>(next);
    const uint32_t lane = take_lane(machine.simdgroups[simdgroup], mode);
    machine.current = &machine.fibers[simdgroup * kLanes + lane];
    msl_switch(&machine.scheduler_stack_pointer, machine.current->stack_pointer);
    machine.current = nullptr;
  }
  for (uint32_t i = 0; i < machine.simdgroups.size(); ++i) flush_traffic(i);
}

}  // namespace

void run_grid() {
  const MslLaunch& launch = *machine.launch;
  uint32_t count[3];
  for (int d = 0; d < 3; ++d) count[d] = (launch.grid[d] + launch.threadgroup[d] - 1) / launch.threadgroup[d];
  std::vector<uint32_t> order(count[0] * count[1] * count[2]);
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  for (size_t i = order.size(); i > 1 && launch.schedule != kInOrder; --i) {
    std::swap(order[i - 1], order[machine.random() % i]);
  }
  for (const uint32_t index : order) {
    if (machine.is_aborted) break;
    machine.group_index = index;
    machine.group_position[0] = index % count[0];
    machine.group_position[1] = index / count[0] % count[1];
    machine.group_position[2] = index / (count[0] * count[1]);
    run_threadgroup();
  }
}

}  // namespace msl
