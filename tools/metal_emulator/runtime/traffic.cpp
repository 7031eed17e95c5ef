// How much device memory a launch moves, and how well its simdgroups' accesses coalesce.
//
// Lanes of a simdgroup run one after the other here, but in lock-step on a GPU. If a lane executes an
// instruction for the k-th time since the lanes last met, this counts as one execution together with the k-th
// time of every other lane. Counts are approximate if lanes diverge between two meetings. After kMaxOpen
// executions between two meetings, each lane is counted alone, so counts are never too low.
#include <algorithm>
#include <unordered_map>

#include "machine.h"

namespace msl {
namespace {

constexpr uint32_t kMaxOpen = 1 << 14;

struct Execution {  // one execution of an instruction by a simdgroup
  uint32_t num_lanes;
  uint64_t offset[kLanes];
  uint32_t size[kLanes];
};

struct OpenSite {  // executions of one simdgroup since its lanes last met
  std::vector<Execution> executions;
  uint32_t times[kLanes];  // number of executions by each lane
};

struct OpenSites {
  std::vector<OpenSite> by_site;
  std::vector<uint32_t> touched;
};

std::vector<MslSite> sites;
std::unordered_map<uint64_t, uint32_t> site_index;
std::vector<OpenSites> open_sites;  // by simdgroup

uint32_t find_site(uint64_t pc, uint32_t buffer, bool is_write) {
  const uint64_t key = (pc << 6) | (buffer << 1) | (is_write ? 1 : 0);
  const auto [entry, is_new] = site_index.try_emplace(key, static_cast<uint32_t>(sites.size()));
  if (is_new) sites.push_back({pc - machine.image_begin, buffer, is_write, 0, 0, 0, 0, 0});
  return entry->second;
}

// Adds one execution: sorts its (at most 32) ranges and walks over their union.
void add(MslSite& site, Execution& execution) {
  uint32_t order[kLanes];
  for (uint32_t i = 0; i < execution.num_lanes; ++i) order[i] = i;
  std::sort(order, order + execution.num_lanes,
            [&](uint32_t a, uint32_t b) { return execution.offset[a] < execution.offset[b]; });
  uint64_t bytes = 0, lines = 0, covered = 0, next_line = 0;
  for (uint32_t i = 0; i < execution.num_lanes; ++i) {
    const uint64_t begin = execution.offset[order[i]], end = begin + execution.size[order[i]];
    site.thread_bytes += execution.size[order[i]];
    if (end > covered) bytes += end - std::max(begin, covered);
    covered = std::max(covered, end);
    const uint64_t first = std::max(begin / kLineBytes, next_line), last = (end - 1) / kLineBytes;
    if (last + 1 > first) lines += last + 1 - first;
    next_line = std::max(next_line, last + 1);
  }
  site.executions++;
  site.bytes += bytes;
  site.lines += lines;
  site.min_lines += (bytes + kLineBytes - 1) / kLineBytes;
}

void mark(std::vector<uint64_t>& bits, uint64_t begin, uint64_t end) {
  for (uint64_t i = begin; i < end;) {
    const uint64_t count = std::min<uint64_t>(end - i, 64 - i % 64);
    const uint64_t ones = count == 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
    bits[i / 64] |= ones << (i % 64);
    i += count;
  }
}

uint64_t num_marked(const std::vector<uint64_t>& bits) {
  uint64_t count = 0;
  for (const uint64_t word : bits) count += static_cast<uint64_t>(__builtin_popcountll(word));
  return count;
}

}  // namespace

void start_traffic() {
  sites.clear();
  site_index.clear();
  open_sites.clear();
  for (Region& region : machine.regions) {
    const uint64_t words = (region.end - region.begin + 63) / 64;
    region.bytes_read.assign(words, 0);
    region.bytes_written.assign(words, 0);
  }
}

void record_traffic(Region& region, uint64_t offset, uint64_t size, bool is_write, uint64_t pc) {
  if (size == 0) return;
  mark(is_write ? region.bytes_written : region.bytes_read, offset, offset + size);
  const Fiber& fiber = *machine.current;
  if (open_sites.size() <= fiber.simdgroup) open_sites.resize(fiber.simdgroup + 1);
  OpenSites& open = open_sites[fiber.simdgroup];
  const uint32_t index = find_site(pc, region.buffer, is_write);
  if (open.by_site.size() <= index) open.by_site.resize(index + 1);
  OpenSite& site = open.by_site[index];
  if (site.executions.empty()) open.touched.push_back(index);
  const uint32_t time = site.times[fiber.lane]++;
  if (time >= kMaxOpen) {
    Execution alone = {1, {offset}, {static_cast<uint32_t>(size)}};
    add(sites[index], alone);
    return;
  }
  if (time == site.executions.size()) site.executions.push_back({});
  Execution& execution = site.executions[time];
  execution.offset[execution.num_lanes] = offset;
  execution.size[execution.num_lanes++] = static_cast<uint32_t>(size);
}

void flush_traffic(uint32_t simdgroup) {
  if (simdgroup >= open_sites.size()) return;
  OpenSites& open = open_sites[simdgroup];
  for (const uint32_t index : open.touched) {
    OpenSite& site = open.by_site[index];
    for (Execution& execution : site.executions) add(sites[index], execution);
    site.executions.clear();
    std::fill(std::begin(site.times), std::end(site.times), 0);
  }
  open.touched.clear();
}

void finish_traffic() {
  for (uint32_t i = 0; i < open_sites.size(); ++i) flush_traffic(i);
  for (const Region& region : machine.regions) {
    if (region.is_threadgroup()) continue;
    MslBuffer& buffer = machine.launch->buffers[region.buffer];
    buffer.unique_bytes_read = num_marked(region.bytes_read);
    buffer.unique_bytes_written = num_marked(region.bytes_written);
  }
  machine.launch->sites = sites.data();
  machine.launch->num_sites = static_cast<uint32_t>(sites.size());
}

}  // namespace msl
