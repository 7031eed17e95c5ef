// A launch: lay out memory, run every threadgroup, hand back what was written.
#include <link.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "machine.h"
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace msl {

Machine machine;

namespace {

// ---- faults and time ------------------------------------------------------------------------------------

sigjmp_buf fault_return;
uint64_t fault_address;
pthread_t runner;

void on_fault(int signal_number, siginfo_t* info, void*) {
  fault_address = reinterpret_cast<uint64_t>(info->si_addr);
  siglongjmp(fault_return, signal_number);
}

// First asks: the next access or meeting ends the launch in good order. A kernel that does neither until
// the timer fires again is in a loop of its own, where jumping out does no harm.
void on_timer(int signal_number, siginfo_t*, void*) {
  if (!pthread_equal(pthread_self(), runner)) {
    pthread_kill(runner, signal_number);
    return;
  }
  if (machine.is_out_of_time) siglongjmp(fault_return, signal_number);
  machine.is_out_of_time = true;
}

void report_timeout() {
  report(true, 0, 0, 0, "the kernel does not end: stopped after %u s of processor time",
         machine.launch->time_limit_s);
}

// Signal handlers, the time limit and the floating-point mode of a launch, undone at its end.
class Environment {
 public:
  Environment() {
    static uint8_t handler_stack[65536];
    stack_t stack{};
    stack.ss_sp = handler_stack;
    stack.ss_size = sizeof handler_stack;
    sigaltstack(&stack, &old_stack_);
    struct sigaction action{};
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (size_t i = 0; i < std::size(kSignals); ++i) {
      action.sa_sigaction = kSignals[i] == SIGVTALRM ? on_timer : on_fault;
      sigaction(kSignals[i], &action, &old_actions_[i]);
    }
    const timeval limit{machine.launch->time_limit_s, 0};
    const itimerval timer{{1, 0}, limit};
    if (limit.tv_sec) setitimer(ITIMER_VIRTUAL, &timer, &old_timer_);
    flush_denormals();
  }
  ~Environment() {
    restore_denormals();
    if (machine.launch->time_limit_s) setitimer(ITIMER_VIRTUAL, &old_timer_, nullptr);
    for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &old_actions_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  static constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGVTALRM};
  stack_t old_stack_{};
  struct sigaction old_actions_[std::size(kSignals)];
  itimerval old_timer_{};
#if defined(__x86_64__)
  uint32_t old_mode_ = 0;
  void flush_denormals() {
    constexpr uint32_t kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
    old_mode_ = _mm_getcsr();
    if (machine.launch->flush_denormals) _mm_setcsr(old_mode_ | kFlushToZero | kDenormalsAreZero);
  }
  void restore_denormals() { _mm_setcsr(old_mode_); }
#else  // aarch64: bit 24 of FPCR. Never yet run.
  uint64_t old_mode_ = 0;
  void flush_denormals() {
    asm volatile("mrs %0, fpcr" : "=r"(old_mode_));
    if (machine.launch->flush_denormals) asm volatile("msr fpcr, %0" : : "r"(old_mode_ | uint64_t{1} << 24));
  }
  void restore_denormals() { asm volatile("msr fpcr, %0" : : "r"(old_mode_)); }
#endif
};

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
  for (int d = 0; d < 3; ++d) {  // those at the edge of the grid are smaller
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
  memset(machine.arena, 0xFF, kArenaBytes);  // NaN to every float type

  machine.fibers.resize(machine.num_threads);
  machine.simdgroups.resize((machine.num_threads + kLanes - 1) / kLanes);
  for (uint32_t i = 0; i < machine.simdgroups.size(); ++i) {
    Simdgroup& simdgroup = machine.simdgroups[i];
    simdgroup.num_live = std::min(kLanes, machine.num_threads - i * kLanes);
    simdgroup.num_waiting = simdgroup.parity = 0;
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

// Which simdgroup runs next, or -1. Greedy and reverse schedules stay with one as long as it can run.
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
  uint32_t simdgroup = 0;
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

// ---- memory ---------------------------------------------------------------------------------------------

// One reservation for all buffers, with kGap of unmapped space around each.
class Memory {
 public:
  bool reserve() {
    const MslLaunch& launch = *machine.launch;
    for (uint32_t i = 0; i < launch.num_buffers; ++i) size_ += kGap + pages(launch.buffers[i].bytes);
    size_ += 2 * kGap;
    base_ = map(size_, PROT_NONE);
    return base_ != MAP_FAILED;
  }
  ~Memory() {
    for (const auto& [address, size] : mappings_) munmap(address, size);
  }

  void lay_out() {
    const MslLaunch& launch = *machine.launch;
    uint64_t offset = kGap;
    for (uint32_t i = 0; i < launch.num_buffers; ++i) {
      place(i, static_cast<uint8_t*>(base_) + offset);
      offset += pages(launch.buffers[i].bytes) + kGap;
    }
    machine.arena = static_cast<uint8_t*>(base_) + offset;
    mprotect(machine.arena, kArenaBytes, PROT_READ | PROT_WRITE);
    machine.arena_shadow = launch.checks ? shadow(kArenaBytes) : nullptr;
    const uint64_t num_threads =
        uint64_t{launch.threadgroup[0]} * launch.threadgroup[1] * launch.threadgroup[2];
    machine.stacks = static_cast<uint8_t*>(map(num_threads * kStackBytes, PROT_READ | PROT_WRITE));
  }

  void write_back() {
    const MslLaunch& launch = *machine.launch;
    for (uint32_t i = 0; i < launch.num_buffers; ++i) {
      const MslBuffer& buffer = launch.buffers[i];
      if (buffer.kind == kMslInput) continue;
      memcpy(buffer.host, machine.buffers[i], buffer.bytes);
      if (buffer.kind == kMslOutput && launch.checks && !machine.is_aborted) check_written(i);
    }
  }

 private:
  uint64_t size_ = 0;
  void* base_ = nullptr;
  std::vector<std::pair<void*, uint64_t>> mappings_;

  static uint64_t pages(uint64_t bytes) {
    return (std::max<uint64_t>(bytes, 1) + 0xFFFF) & ~uint64_t{0xFFFF};
  }

  void* map(uint64_t size, int protection) {
    void* address = mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address != MAP_FAILED) mappings_.push_back({address, size});
    return address;
  }

  Cell* shadow(uint64_t bytes) {
    return static_cast<Cell*>(map((bytes + 1) * sizeof(Cell), PROT_READ | PROT_WRITE));
  }

  // Ends flush with the unmapped gap (up to 16-byte alignment), so that even unchecked kernels fault.
  void place(uint32_t index, uint8_t* space) {
    const MslBuffer& buffer = machine.launch->buffers[index];
    const uint64_t room = pages(buffer.bytes);
    uint8_t* data = space + ((room - buffer.bytes) & ~uint64_t{15});
    mprotect(space, room, PROT_READ | PROT_WRITE);
    if (buffer.kind == kMslOutput) {
      memset(data, 0xFF, buffer.bytes);  // NaN to every float type
    } else {
      memcpy(data, buffer.host, buffer.bytes);
    }
    if (buffer.kind == kMslInput) mprotect(space, room, PROT_READ);
    const bool is_tracked = buffer.kind != kMslInput && machine.launch->checks;
    Cell* cells = is_tracked ? shadow(buffer.bytes) : nullptr;
    if (cells && buffer.kind == kMslInitialisedOutput) {
      for (uint64_t i = 0; i < buffer.bytes; ++i) cells[i].is_initialised = true;
    }
    const auto begin = reinterpret_cast<uint64_t>(data);
    machine.regions.push_back({begin,
                               begin + buffer.bytes,
                               buffer.name,
                               cells,
                               buffer.valid,
                               index,
                               buffer.kind == kMslInput,
                               {},
                               {}});
    machine.buffers[index] = data;
  }

  static void check_written(uint32_t index) {
    const MslBuffer& buffer = machine.launch->buffers[index];
    const Cell* cells = machine.regions[index].shadow;
    uint64_t missing = 0, first = 0;
    for (uint64_t i = 0; i < buffer.bytes; ++i) {
      if (cells[i].is_initialised) continue;
      if (missing++ == 0) first = i;
    }
    if (!missing) return;
    const int no_line = -1 - static_cast<int>(index);  // tells the reports of several outputs apart
    report(false, 0, 0, no_line, "output '%s': %llu of %llu bytes never written (first at byte %llu)",
           buffer.name, static_cast<unsigned long long>(missing),
           static_cast<unsigned long long>(buffer.bytes), static_cast<unsigned long long>(first));
  }
};

// Where this library lies in memory: reports give places relative to it.
int find_image(dl_phdr_info* info, size_t, void*) {
  const auto self = reinterpret_cast<uint64_t>(&msl_launch);
  uint64_t end = 0;
  bool is_ours = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type != PT_LOAD) continue;
    const uint64_t segment = info->dlpi_addr + header.p_vaddr;
    is_ours |= self >= segment && self < segment + header.p_memsz;
    end = std::max<uint64_t>(end, segment + header.p_memsz);
  }
  if (!is_ours) return 0;
  machine.image_begin = info->dlpi_addr;
  machine.image_end = end;
  return 1;
}

void reset(MslLaunch* launch) {
  machine = Machine{};
  machine.launch = launch;
  machine.threadgroup_epoch = machine.device_epoch = 1;
  constexpr uint64_t kGoldenRatio = 0x9E3779B97F4A7C15, kNonZero = 88172645463325252;
  machine.random_state = launch->seed * kGoldenRatio + kNonZero;
  if (machine.random_state == 0) machine.random_state = kNonZero;
  constexpr int kWarmUp = 4;  // neighbouring seeds start alike
  for (int i = 0; i < kWarmUp; ++i) machine.random();
  dl_iterate_phdr(find_image, nullptr);
}

void report_signal(int signal_number) {
  if (signal_number == SIGFPE) {
    report(true, 0, 0, 0, "integer division by zero");
  } else if (signal_number == SIGVTALRM) {
    report_timeout();
  } else {
    describe_fault(fault_address);
  }
}

}  // namespace

void check_time() {
  report_timeout();
  leave();
}

}  // namespace msl

extern "C" uint32_t msl_launch_size() { return sizeof(MslLaunch); }

extern "C" int msl_launch(MslLaunch* launch) {
  msl::reset(launch);
  msl::Memory memory;
  if (!memory.reserve()) return -1;
  memory.lay_out();
  msl::start_traffic();
  msl::runner = pthread_self();
  {
    const msl::Environment environment;
    const int signal_number = sigsetjmp(msl::fault_return, 1);
    if (signal_number == 0) {
      msl::run_grid();
    } else {
      msl::report_signal(signal_number);
    }
  }
  msl::machine.current = nullptr;
  msl::finish_traffic();
  memory.write_back();
  return msl::machine.is_aborted ? 1 : 0;
}
