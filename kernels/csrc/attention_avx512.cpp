#include "attention.h"

namespace octavo::OCTAVO_ISA {

AttendKernel fast_attend_kernel(const AttendArgs&) { return {nullptr, nullptr, 0}; }

}  // namespace octavo::OCTAVO_ISA
