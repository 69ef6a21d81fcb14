#include "pool.h"

#include <algorithm>
#include <chrono>

#include <unistd.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#else
#include <condition_variable>
#include <mutex>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {

namespace {

constexpr uint64_t kTileBits = 24;
constexpr uint64_t kOpBits = 16;
constexpr uint64_t kTileMask = (1ull << kTileBits) - 1;
constexpr uint64_t kClosed = (1ull << kOpBits) - 1;
constexpr auto kIdleSpin = std::chrono::microseconds(50);
constexpr int kMaxShares = 16;             // of more threads some go together, or looking for tiles left would take long
constexpr int kSpinsBeforeYield = 4000;    // some 50 us: the core may be needed by whoever holds the last tile

uint64_t pack(uint64_t round, uint64_t op, uint64_t tile) {
  return round << (kTileBits + kOpBits) | op << kTileBits | tile;
}
uint64_t without_tile(uint64_t state) { return state & ~kTileMask; }
uint64_t round_of(uint64_t state) { return state >> (kTileBits + kOpBits); }
uint64_t op_of(uint64_t state) { return state >> kTileBits & kClosed; }
int tile_of(uint64_t state) { return static_cast<int>(state & kTileMask); }
bool is_open(uint64_t state) { return op_of(state) != kClosed; }

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

#if defined(__linux__)
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}
#else
std::mutex sleep_mutex;
std::condition_variable sleep_condition;
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
  std::unique_lock<std::mutex> lock(sleep_mutex);
  sleep_condition.wait(lock, [&] { return word.load() != seen; });
}
void wake_all(std::atomic<uint32_t>&) {
  { std::lock_guard<std::mutex> lock(sleep_mutex); }
  sleep_condition.notify_all();
}
#endif

}  // namespace

#if defined(__x86_64__)
FloatState::FloatState() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
FloatState::~FloatState() { _mm_setcsr(static_cast<uint32_t>(saved_)); }
#elif defined(__aarch64__)
FloatState::FloatState() {
  asm volatile("mrs %0, fpcr" : "=r"(saved_));
  const uint64_t plain = 0;
  asm volatile("msr fpcr, %0" : : "r"(plain));
}
FloatState::~FloatState() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
FloatState::FloatState() : saved_(0) {}
FloatState::~FloatState() {}
#endif

int64_t process_id() { return getpid(); }

Pool::Pool(int num_threads, Work& work)
    : state_(pack(0, kClosed, 0)), num_shares_(std::min(num_threads, kMaxShares)),
      shares_(std::make_unique<Share[]>(static_cast<size_t>(num_shares_))), work_(work), process_(process_id()) {
  workers_.reserve(static_cast<size_t>(num_threads));
  try {
    for (int thread = 1; thread < num_threads; ++thread) workers_.emplace_back([this, thread] { worker(thread); });
  } catch (...) {    // the system has no more threads: those there are must not outlive us
    end_workers();
    throw;
  }
}

Pool::~Pool() { end_workers(); }

void Pool::end_workers() {
  const bool is_forked = process_ != process_id();
  stop_.store(true);
  ticket_.fetch_add(1);
  if (!is_forked) wake_all(ticket_);
  for (std::thread& worker : workers_) {
    if (is_forked) worker.detach(); else worker.join();    // joining a thread that did not come along never ends
  }
  workers_.clear();
}

// A worker that is about to sleep first counts itself, then reads the ticket, then looks at the state once more; the
// caller opens the state, then moves the ticket, then looks at the count. Whichever comes second sees the other.
void Pool::wake() {
  ticket_.fetch_add(1);
  if (num_sleeping_.load() > 0) wake_all(ticket_);
}

void Pool::run() {
  start();
  finish();
}

void Pool::start() {
  const FloatState plain;
  const uint64_t state = open_next(-1, round_of(state_.load(std::memory_order_relaxed)) + 1, 0);
  if (is_open(state) && !workers_.empty()) wake();
}

void Pool::finish() {
  const FloatState plain;
  walk(0, state_.load(std::memory_order_acquire));
}

// Opens the next operation that has tiles, or closes the run if there is none. An operation of a single tile is not worth
// telling others of: it is run on the way.
uint64_t Pool::open_next(int after, uint64_t round, int thread) {
  const int num_ops = work_.num_ops();
  int op = after;
  while (++op < num_ops) {
    const int total = work_.total(op);
    if (total == 0) continue;
    work_.entered(op);
    if (total > 1) break;
    work_.run(op, 0, thread);
  }
  if (op >= num_ops) work_.entered(-1);
  const uint64_t state = pack(round, op < num_ops ? static_cast<uint64_t>(op) : kClosed, 0);
  state_.store(state);
  return state;
}

void Pool::worker(int thread) {
  const FloatState plain;
  for (;;) {
    wait_for_work();
    if (stop_.load()) return;
    walk(thread, state_.load(std::memory_order_acquire));
  }
}

void Pool::wait_for_work() {
  auto spin_until = std::chrono::steady_clock::now() + kIdleSpin;
  for (int spins = 1; !stop_.load(std::memory_order_relaxed); ++spins) {
    if (is_open(state_.load(std::memory_order_acquire))) return;
    pause();
    if (spins % 64 != 0 || std::chrono::steady_clock::now() < spin_until) continue;
    num_sleeping_.fetch_add(1);
    const uint32_t seen = ticket_.load();
    if (!is_open(state_.load()) && !stop_.load()) sleep_on(ticket_, seen);
    num_sleeping_.fetch_sub(1);
    spin_until = std::chrono::steady_clock::now() + kIdleSpin;
  }
}

void Pool::walk(int thread, uint64_t state) {
  while (is_open(state)) {
    const uint64_t open = without_tile(state);
    const int op = static_cast<int>(op_of(state));
    const int total = work_.total(op);    // once counted below, the operation may be over and the total the next run's
    const int num_done = run_tiles(open, total, thread);
    // While a tile that was run here is not counted, the operation cannot be complete: the word is still of this one.
    const bool is_last = num_done > 0 && num_done + tile_of(state_.fetch_add(static_cast<uint64_t>(num_done),
                                                                             std::memory_order_acq_rel)) == total;
    state = is_last ? open_next(op, round_of(open), thread) : wait_for_change(open);
  }
}

// The thread's own share, then what others have left of theirs. Returns the number of tiles run.
int Pool::run_tiles(uint64_t open, int total, int thread) {
  const int op = static_cast<int>(op_of(open));
  int num_done = 0;
  for (int i = 0; i < num_shares_; ++i) {
    const int share = (thread + i) % num_shares_;
    for (int tile = claim(open, total, share); tile >= 0; tile = claim(open, total, share)) {
      work_.run(op, tile, thread);
      ++num_done;
    }
  }
  return num_done;
}

// The next tile of a share, or -1. Nobody resets the words: the first claim of an operation replaces an earlier one's word.
// A thread that was put aside before its claim may find that the operation is over. All its tiles have been claimed then,
// so what it took, by a total that may be the next run's, was none of them; and a word that is ahead of it tells as much.
int Pool::claim(uint64_t open, int total, int share) {
  const auto start_of = [&](int64_t s) { return static_cast<int>((total * s + num_shares_ - 1) / num_shares_); };
  const int end = start_of(share + 1);
  std::atomic<uint64_t>& next = shares_[static_cast<size_t>(share)].next;
  uint64_t word = next.load(std::memory_order_acquire);
  for (;;) {
    const int64_t ahead = static_cast<int64_t>(without_tile(word) - open);
    const int tile = ahead == 0 ? tile_of(word) : start_of(share);
    if (ahead > 0 || tile >= end) return -1;
    const uint64_t claimed = open + static_cast<uint64_t>(tile) + 1;
    if (next.compare_exchange_weak(word, claimed, std::memory_order_acq_rel, std::memory_order_acquire)) {
      return without_tile(state_.load(std::memory_order_acquire)) == open ? tile : -1;
    }
  }
}

uint64_t Pool::wait_for_change(uint64_t open) {
  for (int spins = 1;; ++spins) {
    const uint64_t state = state_.load(std::memory_order_acquire);
    if (without_tile(state) != open) return state;
    if (spins % kSpinsBeforeYield == 0) std::this_thread::yield(); else pause();
  }
}

}  // namespace paceline
