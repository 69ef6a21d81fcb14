// The thread pool: every tile of every operation runs once, operations in order, for 1 to 4 threads.
#include <atomic>
#include <memory>

#include "../pool.h"
#include "check.h"

namespace paceline::test {
namespace {

class CountingWork final : public Work {
 public:
  CountingWork(Check& check, std::vector<int> totals) : check_(check), totals_(std::move(totals)), runs_(64 * totals_.size()) {}

  int num_ops() const override { return static_cast<int>(totals_.size()); }
  int total(int op) const override { return totals_[static_cast<size_t>(op)]; }
  void entered(int) override {}
  void run(int op, int tile, int) override {
    runs_[static_cast<size_t>(op * 64 + tile)].fetch_add(1);
    for (int earlier = 0; earlier < op; ++earlier) {
      if (complete_[static_cast<size_t>(earlier)].load() != totals_[static_cast<size_t>(earlier)]) is_disordered_ = true;
    }
    complete_[static_cast<size_t>(op)].fetch_add(1);
  }

  void verify() {
    check_.expect(!is_disordered_, "an operation began before the one ahead of it was complete");
    for (size_t op = 0; op < totals_.size(); ++op) {
      for (int tile = 0; tile < 64; ++tile) {
        const int wanted = tile < totals_[op] ? 1 : 0;
        check_.expect(runs_[op * 64 + static_cast<size_t>(tile)].load() == wanted, "operation %d tile %d",
                      static_cast<int>(op), tile);
      }
    }
  }

 private:
  Check& check_;
  std::vector<int> totals_;
  std::vector<std::atomic<int>> runs_;
  std::atomic<int> complete_[64] = {};
  std::atomic<bool> is_disordered_{false};
};

}  // namespace

void test_pool() {
  for (int num_threads = 1; num_threads <= 4; ++num_threads) {
    Check check("pool of " + std::to_string(num_threads));
    Pool pool(num_threads);
    Random random(static_cast<uint64_t>(num_threads));
    for (int round = 0; round < 100; ++round) {
      std::vector<int> totals(static_cast<size_t>(1 + random.below(20)));
      for (int& total : totals) total = static_cast<int>(random.below(8) == 0 ? 0 : random.below(64));
      CountingWork work(check, totals);
      pool.run(work);
      work.verify();
    }
  }
}

}  // namespace paceline::test
