#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "features.h"

namespace nb = nanobind;
using namespace paceline;

void bind_linear(nb::module_& m) {
  m.def("paths", [] {
    std::vector<std::string> names;
    for (const KernelTable* table : available_tables()) names.push_back(table->name);
    return names;
  });
}
