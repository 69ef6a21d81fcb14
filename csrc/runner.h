// A program bound to its weights, its cache and its threads. One call runs one step.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "program.h"

namespace paceline {

constexpr int64_t kRowTile = 64;           // rows that a tile of a linear takes where there are many
constexpr int64_t kTilesPerThread = 6;     // enough to end evenly; 3 and 12 are as fast (docs/log.md)
constexpr int64_t kSpareRows = 8;          // rows that may need another block in a step that begins unasked

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The first key that the query at `position` sees; a window of 0 hides none.
inline int64_t first_key_of(int64_t position, int64_t window) {
  return window > 0 && position >= window ? position - window + 1 : 0;
}

// One step's arrays, as ForwardBatch (paceline/ops/interface.py) has them.
struct StepInput {
  int64_t num_tokens, num_rows, num_wanted, num_copies, num_groups, max_blocks;
  const int32_t* token_ids;
  const int32_t* positions;
  const int32_t* row_starts;
  const int32_t* block_tables;  // [num_groups][num_rows][max_blocks]
  const int32_t* wanted;
  const int32_t* copies;        // [num_copies][2]
  Sampling sampling;
};

// Throws std::invalid_argument unless every entry's row is below num_wanted, ascending, and every token id inside the
// vocabulary: sample trusts them.
void check_extras(const SamplingExtras& extras, int64_t num_wanted, int64_t vocab_size);

// 64-byte aligned memory that only grows; its content is lost when it does. Empty after it failed to.
class Memory {
 public:
  void reserve(size_t num_bytes);
  template <typename T> T* as() const { return static_cast<T*>(static_cast<void*>(data_.get())); }

 private:
  struct Free { void operator()(void* p) const; };
  std::unique_ptr<void, Free> data_;
  size_t size_ = 0;
};

// The cache: zero pages that the system hands out when they are first touched. That takes a step of a prompt longer than
// writing them does, so a thread may touch them all beforehand, in the time that nobody else wants.
class KVMemory {
 public:
  KVMemory(size_t num_bytes, bool has_early_pages);
  ~KVMemory();
  KVMemory(const KVMemory&) = delete;
  KVMemory& operator=(const KVMemory&) = delete;
  uint8_t* data() const { return data_; }

 private:
  void touch();

  uint8_t* data_;
  size_t size_;
  const int64_t process_ = process_id();
  std::atomic<bool> stop_{false};
  std::thread toucher_;
};

struct ProfileLine {
  std::string label;
  int64_t calls;
  double seconds;
};

class Runner final : public Work {
 public:
  // runs_ahead: where it is known, the next step begins before it is asked for; needs a second thread.
  Runner(const KernelTable& kernels, int num_threads, ProgramSpec spec, const KVSpec& kv, bool runs_ahead = false);
  ~Runner();

  // token_ids and logprobs [W]; logits [W][V] or null. What it throws, it throws before anything is changed:
  // std::invalid_argument for the caller's mistakes, std::bad_alloc, std::runtime_error in a forked process.
  void step(const StepInput& in, int32_t* token_ids, float* logprobs, float* logits);
  void poison(const int32_t* block_ids, int64_t count);
  int64_t kv_bytes() const { return kv_.num_blocks * kv_.bytes_per_block; }
  int64_t vocab_size() const { return spec_.vocab_size; }
  // Steps that were under way when they were asked for.
  int64_t num_joined() const;
  void close();

  void profile(bool enable);
  std::vector<ProfileLine> profile_report() const;

  // Work
  int num_ops() const override {
    return is_given_up_.load(std::memory_order_relaxed) ? 0 : static_cast<int>(compiled_.ops.size());
  }
  int total(int op) const override { return totals_[static_cast<size_t>(op)].load(std::memory_order_relaxed); }
  void run(int op, int tile, int thread) override;
  void entered(int op) override;

 private:
  // How this step's tiles cut an operation: part by part of the rows, in a part strips outside and rows inside, so that
  // tiles of the same strips follow each other and a thread finds those in its cache again. With up to 16
  // threads and rows enough, parts are the pool's shares: a thread goes on with rows it has written itself.
  struct Tiling {
    int64_t rows_per_tile, rows_per_part, strips_per_tile, total;
  };
  struct Part {    // of a linear's output
    int64_t first_row, last_row, first_strip, last_strip;
    bool is_empty() const { return first_row >= last_row; }
  };
  struct MergeJob {
    int32_t token, num_segments, partial_segments;
    int64_t partial;
  };
  struct RowTile {    // query tokens of one row that attention takes together, and the keys [first_key, num_keys) they see
    int32_t row, first, last;
    int64_t first_key, num_keys;
    int64_t first_segment() const { return first_key / kSegment; }
    int64_t cost() const { return (last - first) * (num_keys - first_key); }    // of one KV head
  };
  // How attention under one window is shared out in this step.
  struct AttentionPlan {
    int32_t window = 0;
    std::vector<RowTile> row_tiles;
    std::vector<AttendJob> jobs;
    std::vector<int32_t> job_groups;    // first job of each tile, and the end
    std::vector<MergeJob> merges;
    int64_t num_partials = 0;
  };

  std::unique_lock<std::mutex> lock_open() const;
  void run_step(const StepInput& in, int32_t* token_ids, float* logprobs, float* logits);
  void check(const StepInput& in) const;
  void check_row(const StepInput& in, int64_t row) const;
  void check_blocks(const StepInput& in, int64_t row, int64_t group) const;
  void copy_blocks(const StepInput& in);
  void copy_block(int64_t from, int64_t to);
  void take_batch(const StepInput& in);
  void grow(int64_t num_tokens, int64_t num_wanted);

  void plan();
  Tiling tile_linear(const Weight& weight, int64_t num_rows, int64_t num_tiles) const;
  Tiling tile_gated(const Weight& weight, int64_t num_rows) const;
  Tiling tile_strips(int64_t strips, int64_t bytes, int64_t step, int64_t num_rows, int64_t num_tiles) const;
  static Part part_of(const Tiling& tiling, int64_t num_strips, int tile, int64_t first, int64_t last);
  void plan_attention(AttentionPlan& plan);
  void find_row_tiles(AttentionPlan& plan) const;
  void add_jobs(AttentionPlan& plan, const RowTile& tile, int64_t heads_per_job, int64_t num_pieces) const;
  void group_jobs(AttentionPlan& plan, int64_t target_cost) const;
  int64_t job_cost(const AttendJob& job) const;
  const AttentionPlan& attention_of(const Op& op) const;

  void run_rows(const Step& step, int64_t first, int64_t last);
  void run_linear(const Step& step, const Weight& weight, const Tiling& tiling, int tile, int64_t first, int64_t last);
  void run_gated(const Op& op, const Tiling& tiling, int tile, int thread);
  Activations input_of(const Step& linear) const;
  void run_sample(const Step& step, int64_t row, int thread);

  // runner_ahead.cpp
  struct Spare {    // who has spare block number num_blocks + i
    int64_t group, row;
  };
  struct Ahead {    // a step that has been begun unasked
    StepInput step;
    std::vector<int32_t> token_ids, positions, row_starts, block_tables, wanted, top_k, drawn;
    std::vector<float> temperature, top_p, logprobs;
    std::vector<uint64_t> seed, position;
    std::vector<uint32_t> prompt_index, choice_index;
    std::vector<uint8_t> wants_logprob;
    std::vector<Spare> spares;

    void take(const StepInput& in, const int32_t* drawn_before);
    bool has_sampling(const Sampling& asked) const;
  };
  bool can_go_ahead(const StepInput& in, const int32_t* drawn) const;
  void go_ahead(const StepInput& in, const int32_t* drawn);
  bool give_spares();
  bool is_ahead(const StepInput& in) const;
  bool has_blocks_ahead(const StepInput& in) const;
  void join_ahead(const StepInput& in, int32_t* token_ids, float* logprobs);
  void leave_ahead();

  // runner_experts.cpp
  void reserve_routes();
  void sort_routes(const Op& op);
  void tile_expert_linear(int op);
  void gather_routed(const Step& step, int64_t first, int64_t last);
  void run_expert_linear(const Op& op, int tile);

  int64_t num_rows(Rows rows) const {
    if (rows == Rows::wanted) return batch_.num_wanted;
    return rows == Rows::tokens ? batch_.num_tokens : batch_.num_tokens * compiled_.experts_per_token;
  }
  int64_t group() const { return spec_.num_heads / spec_.num_kv_heads; }
  float* buffer(int index) const { return buffers_[static_cast<size_t>(index)].as<float>(); }
  int64_t width(int index) const { return spec_.buffers[static_cast<size_t>(index)].width; }

  const KernelTable& kernels_;
  const ProgramSpec spec_;
  const Compiled compiled_;
  KVCache kv_;
  std::unique_ptr<KVMemory> kv_memory_;
  std::vector<Memory> buffers_;
  std::vector<Memory> prepared_memory_;
  std::vector<Activations> prepared_;
  std::vector<Memory> sample_scratch_;    // one a thread
  std::vector<Memory> gated_scratch_;     // likewise: some rows and columns of gate and up, then of their product
  Memory partials_;
  int logits_buffer_ = -1;
  int64_t capacity_tokens_ = 0, capacity_wanted_ = 0;

  // The step in progress.
  Batch batch_{};                  // with the block tables of the first KV group
  std::vector<Batch> batches_;     // the same with those of each
  Sampling sampling_{};
  std::vector<int32_t> row_of_token_;
  int32_t* token_ids_ = nullptr;
  float* logprobs_ = nullptr;
  std::vector<Tiling> tilings_;
  std::unique_ptr<std::atomic<int>[]> totals_;
  std::vector<AttentionPlan> attention_;    // one for each of Compiled::windows

  // How the tiles of an expert_linear are shared among its experts: those of expert e begin at first_tile[e].
  struct ExpertTiles {
    std::vector<Tiling> tilings;
    std::vector<int> first_tile;
  };

  // Of the layer in progress: where each choice (token * experts_per_token + rank) has its routed row, whose row each is,
  // the first row of each expert, and the tiles of each expert_linear.
  std::vector<int32_t> row_of_choice_, token_of_row_, expert_start_;
  std::vector<ExpertTiles> expert_tiles_;

  struct Timer { int64_t calls = 0; double seconds = 0.0; };
  bool is_profiling_ = false;
  std::vector<Timer> timers_;
  int timed_op_ = -1;
  std::chrono::steady_clock::time_point timed_since_;

  const int64_t num_spares_;    // blocks behind the cache; 0: no step begins unasked
  Ahead ahead_{};
  bool is_under_way_ = false;
  int64_t num_joined_ = 0;
  std::atomic<bool> is_given_up_{false};

  const int64_t process_ = process_id();
  mutable std::mutex mutex_;
  std::unique_ptr<Pool> pool_;    // last: its threads must be gone before anything else is
};

}  // namespace paceline
