// Low-rank adapters (LoRA, Hu et al. 2021; DoRA, Liu et al. 2024) of linear layers, several in one step.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "linear/adapter_rows.h"
#include "mlx/mlx.h"

namespace octavo {

namespace mx = mlx::core;

// a [experts, rank, inputs] and b [experts, rank, outputs], both bf16 or both float32; gain and bias
// [outputs]. Evaluates its arguments.
std::shared_ptr<const AdapterFactors> make_factors(const mx::array& a, const mx::array& b, float scale,
                                                   const std::optional<mx::array>& gain,
                                                   const std::optional<mx::array>& bias);

using Factors = std::shared_ptr<const AdapterFactors>;

// The adapters in the slots of layers that share an input. `outputs`: number of outputs of each layer; their
// results are adjacent. Steps read the table when they run. So captured steps stay valid, and adapters change
// only between steps. Slot 0 is for rows without an adapter.
class AdapterTable {
 public:
  AdapterTable(int inputs, std::vector<int> outputs, int experts, int num_slots);

  // Throws std::invalid_argument for factors of other shapes.
  void put(int slot, int part, Factors factors);
  void clear(int slot);

  const AdapterFactors* at(int slot, std::size_t part) const;
  int inputs() const { return inputs_; }
  int experts() const { return experts_; }
  int num_slots() const { return num_slots_; }
  int total_outputs() const;
  const std::vector<int>& outputs() const { return outputs_; }

 private:
  int inputs_, experts_, num_slots_;
  std::vector<int> outputs_;
  std::vector<Factors> factors_;  // [slots + 1, parts]
};

// Adds the adapter of each row to y [..., outputs], the layers' results for x [..., inputs]. `slots` int32
// has one slot for each group of consecutive rows. Rows of slot 0 are unchanged; a row's bits depend only on
// that row and its adapter.
mx::array add_adapters(const mx::array& y, const mx::array& x, const mx::array& slots,
                       const std::shared_ptr<AdapterTable>& table, mx::StreamOrDevice stream);

// Adds adapters of experts: x [..., M, inputs], places [...] = slot * experts + expert, y [..., M, outputs].
// The leading dimensions of x and places are broadcast.
mx::array add_expert_adapters(const mx::array& y, const mx::array& x, const mx::array& places,
                              const std::shared_ptr<AdapterTable>& table, mx::StreamOrDevice stream);

}  // namespace octavo
