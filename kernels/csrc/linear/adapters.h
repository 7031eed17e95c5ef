// Low-rank adapters (LoRA, Hu et al. 2021; DoRA, Liu et al. 2024) of linear layers, several in one step.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "linear/adapter_rows.h"
#include "mlx/mlx.h"

namespace octavo {

namespace mx = mlx::core;

// Evaluates matrices a [experts, rank, inputs] and b [experts, rank, outputs], both bf16 or both float32, and
// vectors gain and bias [outputs]. Returns them in the layout of the kernels.
std::shared_ptr<const AdapterFactors> make_factors(const mx::array& a, const mx::array& b, float scale,
                                                   const std::optional<mx::array>& gain,
                                                   const std::optional<mx::array>& bias);

using Factors = std::shared_ptr<const AdapterFactors>;

// Adapters by slot, for layers that share an input. Each layer is a part. `outputs` has the number of outputs
// of each part, and results of all parts are adjacent. Kernels look up the table when a step runs, so
// captured steps stay valid when adapters change between steps. Slot 0 has no adapter.
class AdapterTable {
 public:
  AdapterTable(int inputs, std::vector<int> outputs, int experts, int num_slots);

  // Throws std::invalid_argument for factors of wrong shapes.
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

// Adds each row's adapter to y [..., outputs], the layers' results for x [..., inputs]. `slots` int32 has one
// slot for each group of consecutive rows. Rows of slot 0 are unchanged. Results of a row depend only on that
// row and its adapter, bit for bit.
mx::array add_adapters(const mx::array& y, const mx::array& x, const mx::array& slots,
                       const std::shared_ptr<AdapterTable>& table, mx::StreamOrDevice stream);

// Adds experts' adapters to y [..., M, outputs], for x [..., M, inputs] and places [...] = slot * experts +
// expert. The leading dimensions of x and places are broadcast.
mx::array add_expert_adapters(const mx::array& y, const mx::array& x, const mx::array& places,
                              const std::shared_ptr<AdapterTable>& table, mx::StreamOrDevice stream);

}  // namespace octavo
