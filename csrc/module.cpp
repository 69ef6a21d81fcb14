// paceline._kernels: packed weights and single verbs (bind_linear.cpp), the step runner (bind_runner.cpp), the machine's
// limits (bind_calibration.cpp).
#include <nanobind/nanobind.h>

void bind_calibration(nanobind::module_& m);
void bind_linear(nanobind::module_& m);
void bind_runner(nanobind::module_& m);

NB_MODULE(_kernels, m) {
  m.doc() = "CPU kernels of Paceline, one table per instruction-set path.";
  bind_calibration(m);
  bind_linear(m);
  bind_runner(m);
}
