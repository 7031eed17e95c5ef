#include "program/program.h"

#include <cstring>
#include <string>
#include <unordered_set>
#include <utility>

#include "ops/views.h"
#include "program/mlx_tasks.h"
#include "program/primitive.h"

namespace octavo {
namespace {

using Ids = std::unordered_set<std::uintptr_t>;

// Returns the arrays that must be computed for the outputs: one per primitive, inputs before their readers.
std::vector<mx::array> in_order(const std::vector<mx::array>& outputs) {
  struct Visit {
    mx::array x;
    std::size_t next;
  };
  std::vector<mx::array> order;
  std::vector<Visit> path;
  Ids seen;
  const auto visit = [&](const mx::array& x) {
    if (!is_pending(x) || !seen.insert(x.id()).second) return;
    for (const mx::array& sibling : x.siblings()) seen.insert(sibling.id());
    path.push_back({x, 0});
  };
  for (const mx::array& output : outputs) {
    visit(output);
    while (!path.empty()) {
      Visit& last = path.back();
      if (last.next < last.x.inputs().size()) {
        visit(mx::array(last.x.inputs()[last.next++]));
      } else {
        order.push_back(last.x);
        path.pop_back();
      }
    }
  }
  return order;
}

// Returns for each array in `order` whether it depends on these inputs.
std::vector<bool> find_dependent(const std::vector<mx::array>& order, Ids inputs) {
  std::vector<bool> depends;
  for (const mx::array& x : order) {
    bool any = false;
    for (const mx::array& input : x.inputs()) any |= inputs.count(input.id()) > 0;
    if (any)
      for (const mx::array& output : x.outputs()) inputs.insert(output.id());
    depends.push_back(any);
  }
  return depends;
}

// Computes the arrays that the graph reads but that do not depend on an input, because they are equal in all
// runs.
void compute_constants(const std::vector<mx::array>& order, const std::vector<bool>& depends,
                       Program::Evaluate evaluate) {
  std::vector<mx::array> constants;
  Ids independent;
  for (std::size_t i = 0; i < order.size(); ++i)
    if (!depends[i])
      for (const mx::array& output : order[i].outputs()) independent.insert(output.id());
  for (std::size_t i = 0; i < order.size(); ++i)
    if (depends[i])
      for (const mx::array& input : order[i].inputs())
        if (independent.count(input.id()) > 0) constants.push_back(input);
  if (!constants.empty()) evaluate(std::move(constants));
}

}  // namespace

Program::Program(const std::shared_ptr<Arena>& arena, std::vector<mx::array> filled,
                 std::vector<mx::array> fixed, std::vector<mx::array> outputs, Evaluate evaluate)
    : filled_(std::move(filled)), outputs_(std::move(outputs)) {
  Ids inputs;
  for (const mx::array& input : filled_) {
    require(input.dtype() == mx::int32 && !is_pending(input) && input.flags().row_contiguous,
            "filled inputs must be evaluated int32 arrays, got " + dtype_text(input.dtype()));
    inputs.insert(input.id());
    inputs_.push_back({mx::array(input).data<int32_t>(), input.size()});
  }
  for (const mx::array& input : fixed) inputs.insert(input.id());
  std::vector<mx::array> order = in_order(outputs_);
  const std::vector<bool> depends = find_dependent(order, std::move(inputs));
  compute_constants(order, depends, evaluate);
  capture(arena, std::move(order), depends);
  for (mx::array& output : outputs_) require(!is_pending(output), "an output depends on no input");
}

void Program::capture(const std::shared_ptr<Arena>& arena, std::vector<mx::array> order,
                      const std::vector<bool>& depends) {
  Capture capture(arena);
  Ids results;
  const mx::array nothing(0);
  for (std::size_t i = 0; i < order.size(); ++i) {
    mx::array x = std::exchange(order[i], nothing);  // moved, so that memory is freed after its last reader
    if (!depends[i]) continue;
    for (const mx::array& input : x.inputs())
      if (results.count(input.id()) == 0) read_.push_back(input);
    for (const mx::array& output : x.outputs()) results.insert(output.id());
    evaluate(capture, x);
  }
  tasks_ = std::move(capture.tasks);
  queued_ = std::move(capture.queued);
  stream_ = capture.stream;
}

void Program::evaluate(Capture& capture, mx::array& x) {
  const char* const name = x.primitive().name();
  const std::size_t before = capture.tasks.size();
  for (mx::array& input : x.inputs()) input.wait();
  std::vector<mx::array> outputs = x.outputs();
  if (std::strncmp(name, "octavo.", 7) == 0 || std::strncmp(name, "Octavo", 6) == 0) {
    x.primitive().eval_cpu(x.inputs(), outputs);
    require(capture.tasks.size() > before || x.size() == 0,
            std::string(name) + " queued its work outside of the capture");
  } else {
    capture_mlx(x);
  }
  capture.temporaries.clear();
  for (mx::array& output : outputs) output.set_status(mx::array::Status::available);
  x.detach();
}

void Program::run() {
  if (stream_) return run_queued(tasks_, queued_, *stream_);
  const KernelTime timed;
  for (const auto& task : tasks_) task();
}

}  // namespace octavo
