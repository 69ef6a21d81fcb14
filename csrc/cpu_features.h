// (Not features.h: with -I csrc that name would hide the C library's own header.)
// Which kernel tables this machine can run. Decided once, from the processor, never from the environment.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "kernels.h"

namespace paceline {

// Best first; the portable table is always the last.
const std::vector<const KernelTable*>& available_tables();

// Throws std::invalid_argument naming the paths this machine has.
const KernelTable& find_table(const std::string& name);

std::vector<std::pair<std::string, bool>> cpu_features();

}  // namespace paceline
