// Memory for pools of pages: zeros, on huge pages where the system grants them.
#pragma once

#include <cstddef>
#include <memory>

#include "linear/packed.h"

namespace octavo {

// At least `bytes` zeros, aligned as kernels want them; std::bad_alloc if the system refuses. Clearing
// gigabytes takes seconds, so it is not waited for: a thread in the background takes what is not used
// before, slowly while kernels run, and a pool holds its whole memory some time after it was made.
std::shared_ptr<Buffer> pool_memory(std::size_t bytes);

// Whether that thread still has something to take.
bool backing_pools();

}  // namespace octavo
