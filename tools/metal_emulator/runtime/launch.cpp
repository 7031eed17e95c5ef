// A launch: lays out memory, runs every threadgroup, and copies the outputs back.
#include <link.h>

#include <algorithm>

#include "environment.h"
#include "layout.h"
#include "machine.h"

namespace msl {

Machine machine;

namespace {

// Finds the addresses of this library in memory, to which addresses in reports are relative.
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
  constexpr int kWarmUp = 4;  // because similar seeds give similar first numbers
  for (int i = 0; i < kWarmUp; ++i) machine.random();
  dl_iterate_phdr(find_image, nullptr);
}

}  // namespace
}  // namespace msl

extern "C" uint32_t msl_launch_size() { return sizeof(MslLaunch); }

extern "C" int msl_launch(MslLaunch* launch) {
  msl::reset(launch);
  msl::Memory memory;
  if (!memory.reserve()) return -1;
  memory.lay_out();
  msl::start_traffic();
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
