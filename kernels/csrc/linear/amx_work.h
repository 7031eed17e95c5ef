// Division of a layer's work on AMX tiles among threads. Internal linkage: see numeric.h.
#pragma once

#include <atomic>
#include <vector>

#include "linear/amx_tiles.h"
#include "runtime/row_items.h"

namespace octavo::amx {
namespace {

// An item is a block of rows times a run of consecutive panels. The rows stay in L2, and two threads write to
// the same cache lines of y only at the ends of runs.
//
// If there are many rows, each thread computes all runs of its blocks of rows, and all threads read all
// weights. A thread converts its rows to the tiled layout itself, because rows written by another core arrive
// slowly. If there are few rows, all threads share them and divide the weights.
class Work {
 public:
  struct Item {
    int first_panel, last_panel;  // without the panels that these panels gate
    int first_row, last_row;
    int next_panel;  // panel that this thread will probably compute next, or -1
  };

  // `row_bytes`: bytes of a row of activations.
  Work(const LinearCall& call, std::size_t row_bytes)
      : rows_(call.rows),
        panels_(call.weight->shape.num_panels() - call.partner()),
        partner_(call.partner()),
        shared_out_(rows_ >= std::max(kLeastRows, kLeastOfThread * num_threads()) &&
                    rows_ * kOutputsPerRow >= call.weight->shape.outputs) {
    const int threads = num_threads(),
              most = std::max(1, static_cast<int>(kRowBytes / row_bytes / kBlockRows));
    int parts = (rows_ + most * kBlockRows - 1) / (most * kBlockRows);
    if (shared_out_) parts = (parts + threads - 1) / threads * threads;
    block_ = std::max(kBlockRows, whole_blocks((rows_ + parts - 1) / std::max(1, parts)));
    const int wanted = 2 * threads, least = (panels_ + kMostPanels - 1) / kMostPanels;
    run_ = std::max(1, panels_ / ((least + wanted - 1) / wanted * wanted));
    while (!shared_out_ && block_ > kBlockRows && blocks() * runs() < wanted)
      block_ = whole_blocks(block_ / 2);
  }

  // Calls body(item) for every item.
  template <class Body>
  void run(Body&& body) const {
    parallel_for(blocks() * runs(), [&](int i) {
      const bool is_last = i + 1 == blocks() * runs();  // else this thread probably computes the next item
      body(item(i / runs(), i % runs(), is_last ? -1 : (i + 1) % runs() * run_));
    });
  }

  // Calls lay_out(first row, last row) to convert rows, and body(item) for every item once its rows are
  // converted.
  template <class LayOut, class Body>
  void run(LayOut&& lay_out, Body&& body) const {
    if (!shared_out_) {
      for_row_items(rows_, kTileRows, lay_out);
      return run(body);
    }
    std::vector<Share> shares(blocks());
    std::atomic<int> begun{0};
    parallel_for(blocks(), [&](int own) {
      begun.fetch_add(1, std::memory_order_relaxed);
      lay_out(own * block_, std::min(rows_, (own + 1) * block_));
      shares[own].is_laid_out.store(true, std::memory_order_release);
      take(own, shares[own], body);
      if (begun.load(std::memory_order_relaxed) < blocks()) return;  // blocks not yet begun come first
      for (int other = 0; other < blocks(); ++other)
        if (shares[other].is_laid_out.load(std::memory_order_acquire)) take(other, shares[other], body);
    });
  }

  bool is_one_block() const { return blocks() == 1; }

  // Calls body(item, whether it is this thread's first) for every item, if all rows are one block. A thread
  // takes its next item before it computes the current one, to prefetch the next weights. This allows short
  // items, with which threads end at about the same time. (For up to 16 rows, weights are prefetched in
  // memory order, and each item ends with some prefetches that are not used.)
  template <class Body>
  void run_one_block(Body&& body) const {
    const int threads = num_threads(), wanted = (rows_ > kTileRows ? 4 : 2) * threads;
    const int size = std::clamp(panels_ / wanted, 1, kMostPanels), count = (panels_ + size - 1) / size;
    const bool early = count >= 2 * threads;  // else a thread with two items could leave others idle
    std::atomic<int> next{0};
    const auto take = [&] { return next.fetch_add(1, std::memory_order_relaxed); };
    parallel_for(threads, [&](int) {
      bool is_first = true;
      for (int run = take(); run < count; is_first = false) {
        const int later = early ? take() : count;
        const int first = run * size, next_panel = later < count ? later * size : -1;
        body(Item{first, std::min(panels_, first + size), 0, rows_, next_panel}, is_first);
        run = early ? later : take();
      }
    });
  }

  // Calls body(panel, next weights) for the panels of an item, each gate before the panel that it multiplies.
  // Next weights are null if unknown.
  template <class Body>
  void each_panel(const PackedWeight& weight, const Item& item, Body&& body) const {
    for (int panel = item.first_panel; panel < item.last_panel; ++panel) {
      const int later = panel + 1 < item.last_panel ? panel + 1 : item.next_panel;
      const uint8_t* const next = later < 0 ? nullptr : weight.panel(later);
      body(panel, partner_ > 0 ? weight.panel(panel + partner_) : next);
      if (partner_ > 0) body(panel + partner_, next);
    }
  }

 private:
  static constexpr std::size_t kRowBytes = 768 * 1024;
  static constexpr int kMostPanels = 16;
  // Threads divide rows instead of weights if there are at least this many rows in all and per thread, and at
  // most this many outputs per row, because all threads then read all weights. (Measured with 2, 4, 8 and 16
  // threads: rows pass between cores about as slowly as weights arrive from memory.)
  static constexpr int kLeastRows = 256, kLeastOfThread = kBlockRows, kOutputsPerRow = 12;

  // State of a block of rows: the next run of panels by which it is multiplied, and whether it is converted.
  struct Share {
    std::atomic<int> next{0};
    std::atomic<bool> is_laid_out{false};
  };

  static int whole_blocks(int count) { return (count + kBlockRows - 1) / kBlockRows * kBlockRows; }
  int blocks() const { return (rows_ + block_ - 1) / block_; }
  int runs() const { return (panels_ + run_ - 1) / run_; }

  Item item(int block, int run, int next_panel) const {
    return {run * run_, std::min(panels_, (run + 1) * run_), block * block_,
            std::min(rows_, (block + 1) * block_), next_panel};
  }

  template <class Body>
  void take(int block, Share& share, Body&& body) const {
    for (int run; (run = share.next.fetch_add(1, std::memory_order_relaxed)) < runs();)
      body(item(block, run, run + 1 < runs() ? (run + 1) * run_ : -1));
  }

  int rows_, panels_, partner_;
  bool shared_out_;
  int block_ = 0, run_ = 0;
};

}  // namespace
}  // namespace octavo::amx
