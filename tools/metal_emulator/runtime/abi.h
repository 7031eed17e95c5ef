// Interface between the test (abi.py mirrors the structs), a compiled kernel and the runtime.
// Plain C types only. Field order matters: abi.py checks the size of MslLaunch when it loads a kernel.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

// Position of a thread, under the names of Metal's attributes. Vectors of three are padded to four.
struct MslIds {
  uint32_t thread_position_in_grid[4];
  uint32_t thread_position_in_threadgroup[4];
  uint32_t threadgroup_position_in_grid[4];
  uint32_t threads_per_threadgroup[4];
  uint32_t dispatch_threads_per_threadgroup[4];
  uint32_t threadgroups_per_grid[4];
  uint32_t threads_per_grid[4];
  uint32_t grid_size[4];
  uint32_t grid_origin[4];
  uint32_t thread_index_in_threadgroup;
  uint32_t thread_index_in_simdgroup;
  uint32_t simdgroup_index_in_threadgroup;
  uint32_t simdgroups_per_threadgroup;
  uint32_t dispatch_simdgroups_per_threadgroup;
  uint32_t threads_per_simdgroup;
  uint32_t thread_execution_width;
  uint32_t thread_index_in_quadgroup;
  uint32_t quadgroup_index_in_threadgroup;
  uint32_t quadgroups_per_threadgroup;
  uint32_t dispatch_quadgroups_per_threadgroup;
};

// ---- kernel -> runtime ----------------------------------------------------------------------------------

constexpr uint32_t kMslGatherStride = 64;  // bytes per lane in the data of a gather

struct MslGather {
  const uint8_t* data;  // 32 slots of kMslGatherStride bytes
  uint32_t active;      // bit i: lane i took part
  uint32_t lane;        // lane of the caller
};

// Waits for all lanes of the simdgroup; the value (<= 64 bytes) of each lane becomes visible to all lanes.
MslGather msl_rt_gather(const void* value, uint32_t size, const char* operation, int line);
void msl_rt_barrier(int is_simdgroup, uint32_t flags, int line);
void* msl_rt_threadgroup_memory(const char* name, uint32_t size, int line);
void msl_rt_atomic(const void* address, uint32_t size);  // checks and orders an atomic access
void msl_rt_fail(const char* message, int line);

// Entry point of the kernel; the runtime calls it once per thread.
void msl_entry(void* const* buffers, const MslIds* ids);

// ---- test -> runtime ------------------------------------------------------------------------------------

enum MslBufferKind : uint32_t { kMslInput = 0, kMslOutput = 1, kMslInitialisedOutput = 2 };

struct MslBuffer {
  const char* name;
  void* host;  // read at the start; outputs are written back at the end
  uint64_t bytes;
  uint32_t kind;         // MslBufferKind
  const uint8_t* valid;  // null, or one byte per byte of the buffer: 0 if the byte may not be read
  uint64_t unique_bytes_read;
  uint64_t unique_bytes_written;
};

struct MslReport {
  char text[480];
  uint64_t pc;        // address of the access, relative to the kernel's library; 0 if only `line` is known
  uint64_t other_pc;  // address of the other access of a race
  int32_t line;
  int32_t is_fatal;
};

// Counts of one load or store instruction of the kernel and one buffer, summed over all simdgroups.
struct MslSite {
  uint64_t pc;
  uint32_t buffer;
  uint32_t is_write;
  uint64_t executions;    // executions, each by one simdgroup
  uint64_t thread_bytes;  // summed over lanes
  uint64_t bytes;         // distinct bytes of an execution: bytes that lanes share count once
  uint64_t lines;         // lines of 128 bytes that an execution touches
  uint64_t min_lines;     // lines that the distinct bytes of an execution would fill
};

// How often simdgroups executed an operation; for threadgroup_barrier, how often threadgroups did.
struct MslOperation {
  char name[40];
  uint64_t executions;
};
constexpr uint32_t kMslMaxOperations = 48;

enum MslSchedule : uint32_t { kMixed = 0, kRandom = 1, kGreedy = 2, kReverse = 3, kInOrder = 4 };

struct MslLaunch {
  uint32_t grid[3];
  uint32_t threadgroup[3];
  MslBuffer* buffers;
  uint64_t seed;
  uint32_t num_buffers;
  uint32_t schedule;
  uint32_t strict;  // 0: divergent simdgroup operations and barriers run with the lanes that reached them
  uint32_t checks;
  uint32_t flush_denormals;
  uint32_t time_limit_s;  // processor time; 0: no limit
  MslReport* reports;
  uint32_t max_reports;
  uint32_t num_reports;
  uint64_t num_switches;
  uint64_t num_accesses;
  uint64_t num_gathers;
  uint64_t num_barriers;
  const MslSite* sites;  // valid until the next launch
  uint32_t num_sites;
  uint32_t threadgroup_bytes;
  MslOperation operations[kMslMaxOperations];
  uint32_t num_operations;
};

uint32_t msl_launch_size();
int msl_launch(MslLaunch* launch);  // 0 done, 1 stopped at a fatal report, -1 out of address space

}  // extern "C"
