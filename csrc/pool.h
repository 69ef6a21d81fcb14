// Threads that walk a list of operations together. Knows tiles, not what they compute.
//
// An operation's tiles are dealt out beforehand, neighbours to one thread, so that each claims its own from a word that
// nobody else looks at and finds the next tile's memory where it expects it. A thread with none left takes what it finds
// in the shares of others: one that the system has put aside holds up nobody unless it holds a tile, and one that comes
// late joins at the operation then open. Whoever completes an operation's last tile opens the next one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace paceline {

// What a pool runs. total(op) may be 0: the operation is passed over. run must not throw. A thread that comes late may ask
// for total(op) of a run that is over, any operation of it: the answer does not matter, but the call must be safe.
class Work {
 public:
  virtual int num_ops() const = 0;
  virtual int total(int op) const = 0;
  virtual void run(int op, int tile, int thread) = 0;
  // Told once for each operation that has tiles, in order, as it begins, and of -1 at the end; by any thread.
  virtual void entered(int op) = 0;

 protected:
  ~Work() = default;
};

class Pool {
 public:
  static constexpr int kMaxOps = (1 << 16) - 2;
  static constexpr int kMaxTiles = (1 << 24) - 2;

  // One work for life, which must outlive the pool.
  Pool(int num_threads, Work& work);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Wakes sleeping workers ahead of run(), so that they are up when the work is.
  void wake();
  // Runs every operation of the work, in order, on all threads and the caller. One caller at a time. In a process forked
  // from the one that made the pool there are no workers: the caller does it all.
  void run();
  // The same in two parts: start() leaves the work to the others, finish() joins them until it is done. A run that has been
  // started is finished before the next.
  void start();
  void finish();

 private:
  // The next tile of one thread's share, as (round, operation, tile); a word of an earlier operation stands for the first.
  struct alignas(64) Share {
    std::atomic<uint64_t> next{0};
  };

  void worker(int thread);
  void wait_for_work();
  void walk(int thread, uint64_t state);
  int run_tiles(uint64_t open, int total, int thread);
  int claim(uint64_t open, int total, int share);
  uint64_t open_next(int after, uint64_t round, int thread);
  void end_workers();
  uint64_t wait_for_change(uint64_t open);

  // What all threads watch: round (24 bits), operation (16), its complete tiles (24). The round tells a thread that slept
  // through a whole run that its view is old; an operation of kClosed means that no run is in progress.
  alignas(64) std::atomic<uint64_t> state_;
  const int num_shares_;
  const std::unique_ptr<Share[]> shares_;
  alignas(64) Work& work_;
  std::atomic<uint32_t> ticket_{0};              // what sleeping workers wait on
  std::atomic<int> num_sleeping_{0};
  std::atomic<bool> stop_{false};
  const int64_t process_;
  std::vector<std::thread> workers_;
};

// Changes when the process forks: threads do not come along.
int64_t process_id();

// Rounding to nearest, no flush to zero, no traps: the same for every thread and restored afterwards.
class FloatState {
 public:
  FloatState();
  ~FloatState();
  FloatState(const FloatState&) = delete;
  FloatState& operator=(const FloatState&) = delete;

 private:
  uint64_t saved_;
};

}  // namespace paceline
