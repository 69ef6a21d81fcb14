#include "calibration.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "memory.h"
#include "pool.h"

namespace paceline {
namespace {

constexpr int64_t kSpinRounds = 1 << 18;      // some milliseconds
constexpr int kMeetings = 2000;
constexpr int kSpinsBeforeYield = 20000;      // on a machine with less cores free than threads, waiting must give way

// Threads that meet again and again.
class Meeting {
 public:
  explicit Meeting(int num_threads) : num_threads_(num_threads) {}

  void meet() {
    const int round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 1; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (spins % kSpinsBeforeYield == 0) std::this_thread::yield();
    }
  }

 private:
  const int num_threads_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> round_{0};
};

}  // namespace

Calibration::Calibration(const KernelTable& kernels, int num_threads, int64_t num_bytes)
    : kernels_(kernels), num_threads_(num_threads), num_bytes_(num_bytes) {
  if (num_threads < 1 || num_threads > 1024) {
    throw std::invalid_argument("num_threads must be from 1 to 1024, got " + std::to_string(num_threads));
  }
  if (num_bytes < 1 << 20) throw std::invalid_argument("num_bytes must be at least 2^20, got " + std::to_string(num_bytes));
  memory_ = allocate_weight_memory(static_cast<size_t>(num_bytes), &data_);
  std::memset(data_, 1, static_cast<size_t>(num_bytes));
}

double Calibration::together(const std::function<void(int thread)>& part) const {
  Meeting meeting(num_threads_);
  std::vector<std::thread> others;
  for (int thread = 1; thread < num_threads_; ++thread) {
    others.emplace_back([&, thread] {
      const FloatState plain;
      meeting.meet();
      part(thread);
      meeting.meet();
    });
  }
  const FloatState plain;
  meeting.meet();
  const auto start = std::chrono::steady_clock::now();
  part(0);
  meeting.meet();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (std::thread& other : others) other.join();
  return seconds;
}

double Calibration::read_gb_per_second() {
  const int64_t share = num_bytes_ / num_threads_ / 256 * 256;
  std::atomic<int32_t> seen{0};
  const double seconds = together([&](int thread) {
    seen.fetch_or(kernels_.read_memory(data_ + thread * share, share), std::memory_order_relaxed);
  });
  if (seen.load() == 0) throw std::runtime_error("the memory that was read is not what was written");
  return static_cast<double>(share * num_threads_) / seconds / 1e9;
}

double Calibration::gops(Form form) {
  std::atomic<int64_t> operations{0};
  const double seconds = together([&](int) { operations.fetch_add(kernels_.multiply_add(form, kSpinRounds)); });
  return static_cast<double>(operations.load()) / seconds / 1e9;
}

double Calibration::barrier_nanoseconds() {
  Meeting meeting(num_threads_);
  const double seconds = together([&](int) {
    for (int i = 0; i < kMeetings; ++i) meeting.meet();
  });
  return 1e9 * seconds / kMeetings;
}

}  // namespace paceline
