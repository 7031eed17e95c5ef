// The emulated GPU. It runs one threadgroup at a time; each thread is a fiber, and all share one host thread.
//
//   Machine ── Region*     buffers and threadgroup variables, with shadow memory
//           ├─ Fiber*      threads of the running threadgroup
//           └─ Simdgroup*  32 fibers each: which of them wait or are ready, and data that they exchange
//
// A fiber runs until it must wait for others (barrier, simdgroup operation) or ends. The scheduler then
// chooses the next fiber by a seeded rule. All state is in one static Machine, so launches of a library do
// not overlap.
#pragma once
#include <vector>

#include "abi.h"

namespace msl {

constexpr uint64_t kGap = uint64_t{4} << 30;  // between buffers, so that wrong indices access unmapped space
constexpr uint32_t kMaxThreadgroupBytes = 32768;
constexpr uint32_t kArenaBytes = 2 * kMaxThreadgroupBytes;  // with space for the gaps between variables
constexpr uint32_t kStackBytes = 128 << 10;
constexpr uint32_t kLanes = 32;
constexpr uint32_t kMaxBuffers = 31;
constexpr uint32_t kLineBytes = 128;

// Metal's mem_flags
constexpr uint32_t kMemDevice = 1;
constexpr uint32_t kMemThreadgroup = 2;

// The accesses to one byte of threadgroup memory or of an output, to find races and uninitialised reads.
// An epoch ends at each barrier that orders this kind of memory.
struct Cell {
  uint64_t write_pc, read_pc;
  uint32_t write_group, read_group;  // linear index of the threadgroup plus one; 0: never
  uint32_t write_epoch, read_epoch;
  uint16_t write_thread, read_thread;
  uint16_t write_simd_epoch, read_simd_epoch;
  bool is_initialised;
  bool read_by_many_lanes;
  bool read_by_many_simdgroups;
  bool write_was_atomic;
  uint32_t generation;  // generation of the threadgroup in this history (threadgroup memory only)
};

struct Region {
  uint64_t begin, end;
  const char* name;
  Cell* shadow;          // null: not tracked
  const uint8_t* valid;  // null: all may be read
  uint32_t buffer;       // index, or kNoBuffer for a threadgroup variable
  bool is_read_only;
  std::vector<uint64_t> bytes_read, bytes_written;  // one bit per byte

  static constexpr uint32_t kNoBuffer = ~0u;
  bool is_threadgroup() const { return buffer == kNoBuffer; }
};

enum class State : uint8_t { kReady, kAtSimdgroup, kAtBarrier, kDone };

struct Fiber {
  void* stack_pointer;
  uint8_t* stack;
  uint32_t thread, lane, simdgroup;
  State state;
  const char* operation;  // the operation at which the fiber waits, and its line
  int line;
  uint32_t flags;
  MslIds ids;
};

struct Simdgroup {
  uint32_t num_live, num_waiting;
  uint32_t threadgroup_epoch, device_epoch;  // ended by simdgroup_barrier
  std::vector<uint16_t> ready;               // lanes
  // Values that waiting lanes brought, and values that the last gather gave to its lanes. The next gather
  // begins when no lane is ready, so all lanes have read `exchanged` before it is overwritten.
  uint8_t brought[kLanes * kMslGatherStride];
  uint8_t exchanged[kLanes * kMslGatherStride];
  uint32_t active;  // bit i: lane i took part in the last gather
};

struct ThreadgroupVariable {
  const char* name;
  int line;
  uint32_t size;
  uint8_t* address;
};

struct Machine {
  MslLaunch* launch;
  void* scheduler_stack_pointer;
  Fiber* current;
  std::vector<Fiber> fibers;
  std::vector<Simdgroup> simdgroups;
  std::vector<Region> regions;
  Region* last_region;
  void* buffers[kMaxBuffers];

  uint8_t* arena;  // threadgroup memory
  Cell* arena_shadow;
  uint32_t arena_used, threadgroup_bytes;
  std::vector<ThreadgroupVariable> variables;

  uint8_t* stacks;
  uint32_t num_threads, num_live, num_at_barrier;
  uint32_t threadgroup_epoch, device_epoch, generation;
  uint32_t group_position[3], group_index;
  uint64_t random_state;
  uint64_t image_begin, image_end;  // addresses of this library in memory
  bool is_aborted;
  volatile bool is_out_of_time;

  uint64_t random() {  // xorshift64
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
  }
};

extern Machine machine;

// switch.cpp
extern "C" void msl_switch(void** save_stack_pointer, void* load_stack_pointer);
void* initial_stack_pointer(uint8_t* stack, void (*start)());
void to_scheduler();
[[noreturn]] void leave();  // ends the current fiber after a fatal report

// memory.cpp
__attribute__((format(printf, 5, 6))) void report(bool is_fatal, uint64_t pc, uint64_t other_pc, int line,
                                                  const char* format, ...);
void access(uint64_t address, uint64_t size, bool is_write, uint64_t pc, bool is_atomic = false);
void describe_fault(uint64_t address);

// traffic.cpp
void start_traffic();
void record_traffic(Region& region, uint64_t offset, uint64_t size, bool is_write, uint64_t pc);
void flush_traffic(uint32_t simdgroup);  // called when lanes have met, which ends their open executions
void finish_traffic();

// meeting.cpp
bool release_simdgroup(uint32_t index, bool allow_subset);
void release_barrier();
void report_deadlock();

// schedule.cpp
void run_grid();

// environment.cpp
void report_timeout();
void check_time();  // ends the launch if its time limit is reached

}  // namespace msl
