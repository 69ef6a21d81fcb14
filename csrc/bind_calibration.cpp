// Python's view of the calibration.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bind_arrays.h"
#include "calibration.h"
#include "cpu_features.h"
#include "pack.h"

namespace nb = nanobind;
using namespace nb::literals;

void bind_calibration(nb::module_& m) {
  using namespace paceline;
  nb::class_<Calibration>(m, "Calibration", "The machine's own limits, as all threads reach them together.")
      .def("__init__", [](Calibration* self, const std::string& path, int num_threads, int64_t num_bytes) {
        new (self) Calibration(find_table(path), num_threads, num_bytes);
      }, "path"_a, "num_threads"_a, "num_bytes"_a = int64_t{256} << 20)
      .def("read_gb_per_second", &Calibration::read_gb_per_second, nb::call_guard<nb::gil_scoped_release>(),
           "One pass over num_bytes; afterwards the caches hold nothing else.")
      .def("gops", [](Calibration& self, const std::string& form) { return self.gops(form_from_name(form)); }, "form"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "Thousand millions of operations a second, products and sums, in the path's instructions for the form.")
      .def("barrier_nanoseconds", &Calibration::barrier_nanoseconds, nb::call_guard<nb::gil_scoped_release>());
}
