// The machine's own limits, measured beside the kernels: memory that all threads read together, products that they add up
// in registers, and what meeting each other costs. Virtual machines flip between states in which these differ by half.
#pragma once

#include <functional>
#include <memory>

#include "kernels.h"

namespace paceline {

class Calibration {
 public:
  // num_bytes: what a read pass walks, shared among the threads; more than the caches hold.
  Calibration(const KernelTable& kernels, int num_threads, int64_t num_bytes);

  // One pass over the memory. GB/s; leaves none of anything else in the caches.
  double read_gb_per_second();
  // Multiplications and additions a second, in thousand millions, of one pass of some milliseconds.
  double gops(Form form);
  // All threads meet, many times: nanoseconds each time.
  double barrier_nanoseconds();

 private:
  // Seconds that `part` takes on all threads together, from when all of them stand ready.
  double together(const std::function<void(int thread)>& part) const;

  const KernelTable& kernels_;
  int num_threads_;
  int64_t num_bytes_;
  uint8_t* data_ = nullptr;
  std::shared_ptr<void> memory_;
};

}  // namespace paceline
