// Placeholder until the step runner arrives.
#include <nanobind/nanobind.h>

void bind_runner(nanobind::module_&) {}
