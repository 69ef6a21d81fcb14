// The thread pool: every tile of every operation runs once, operations in order, for 1 to 16 threads.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "../pool.h"
#include "check.h"

namespace paceline::test {
namespace {

constexpr int kOps = 20, kTiles = 64;

class CountingWork final : public Work {
 public:
  explicit CountingWork(Check& check) : check_(check) {}

  int num_ops() const override { return kOps; }
  int total(int op) const override { return totals_[op].load(std::memory_order_relaxed); }
  void entered(int op) override { entered_.push_back(op); }    // one thread after the other: watched like plain_
  void run(int op, int tile, int) override {
    runs_[op][tile].fetch_add(1);
    for (int earlier = 0; earlier < op; ++earlier) {
      if (complete_[earlier].load() != totals_[earlier].load()) is_disordered_ = true;
    }
    plain_[op][tile] += op > 0 ? plain_[op - 1][0] + 1 : 1;    // not atomic: the thread sanitizer watches the order
    complete_[op].fetch_add(1);
  }

  void prepare(Random& random) {
    for (int op = 0; op < kOps; ++op) {
      totals_[op] = static_cast<int>(random.below(8) == 0 ? 0 : random.below(kTiles));
      complete_[op] = 0;
      entered_.clear();
      for (int tile = 0; tile < kTiles; ++tile) runs_[op][tile] = plain_[op][tile] = 0;
    }
  }

  void verify() {
    check_.expect(!is_disordered_, "an operation began before the one ahead of it was complete");
    std::vector<int> expected;
    for (int op = 0; op < kOps; ++op) {
      if (totals_[op] > 0) expected.push_back(op);
    }
    expected.push_back(-1);
    check_.expect(entered_ == expected, "told of %d operations instead of %d", static_cast<int>(entered_.size()),
                  static_cast<int>(expected.size()));
    for (int op = 0; op < kOps; ++op) {
      for (int tile = 0; tile < kTiles; ++tile) {
        check_.expect(runs_[op][tile].load() == (tile < totals_[op] ? 1 : 0), "operation %d tile %d", op, tile);
      }
    }
  }

 private:
  Check& check_;
  std::atomic<int> totals_[kOps] = {};
  std::atomic<int> runs_[kOps][kTiles] = {};
  std::atomic<int> complete_[kOps] = {};
  int plain_[kOps][kTiles] = {};
  std::vector<int> entered_;
  std::atomic<bool> is_disordered_{false};
};

// Runs with pauses of every length around the time that workers spin before they sleep.
void test_rounds(int num_threads, int num_rounds) {
  Check check("pool of " + std::to_string(num_threads));
  CountingWork work(check);
  Pool pool(num_threads, work);
  Random random(static_cast<uint64_t>(num_threads));
  for (int round = 0; round < num_rounds; ++round) {
    work.prepare(random);
    if (round % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random.below(120)));
    if (round % 4 == 0) pool.wake();
    if (round % 5 == 0) {    // in two parts, with something else between them
      pool.start();
      if (round % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random.below(120)));
      pool.finish();
    } else {
      pool.run();
    }
    work.verify();
  }
}

// A pool that ends at once, asleep, or between a wake and a run.
void test_ends() {
  Check check("pools that end early");
  for (int i = 0; i < 60; ++i) {
    CountingWork work(check);
    Pool pool(3, work);
    if (i % 3 == 1) std::this_thread::sleep_for(std::chrono::microseconds(150));
    if (i % 3 == 2) pool.wake();
    check.expect(pool.num_threads() == 3, "threads");
  }
}

// A forked process has no workers: it can still run, and end the pool without waiting for threads that are not there.
void test_fork() {
  Check check("pool in a forked process");
  auto work = std::make_unique<CountingWork>(check);
  auto pool = std::make_unique<Pool>(3, *work);
  Random random(5);
  work->prepare(random);
  pool->run();
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    work->prepare(random);
    pool->run();
    pool.reset();
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  check.expect(child > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %d", status);
  work->prepare(random);
  pool->run();
  work->verify();
}

}  // namespace

void test_pool() {
  for (int num_threads = 1; num_threads <= 4; ++num_threads) test_rounds(num_threads, 100);
  test_rounds(16, 30);    // more than there are cores
  test_rounds(21, 20);    // and more than there are shares
  test_ends();
  test_fork();
}

}  // namespace paceline::test
