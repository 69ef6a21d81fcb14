// The step after this one, begun before anybody asks for it. While the caller looks at what a step drew, decides who goes on
// and lays out the next arrays, the pool's other threads would wait. Where every row drew one token, the step that follows
// if all of them go on is known: the same rows, each with the token it drew. They begin with it. A step that turns out to be
// that one finds it under way and joins; any other ends it first.
//
// What it may write: the slot behind each row's last token, in a block that only this row writes. A row whose block is full
// needs another one, of which only the caller knows; until then it has a spare block behind the cache.
#include "runner.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace paceline {

namespace {

template <typename T> void copy(std::vector<T>& to, const T* from, int64_t count) { to.assign(from, from + count); }

template <typename T> bool is_same(const std::vector<T>& have, const T* asked) {
  return std::memcmp(have.data(), asked, have.size() * sizeof(T)) == 0;
}

}  // namespace

// The step after `in`, in memory of its own. The tables have room for one block more.
void Runner::Ahead::take(const StepInput& in, const int32_t* drawn_before) {
  const int64_t rows = in.num_rows;
  copy(token_ids, drawn_before, rows);
  positions.resize(static_cast<size_t>(rows));
  row_starts.resize(static_cast<size_t>(rows) + 1);
  wanted.resize(static_cast<size_t>(rows));
  for (int64_t row = 0; row <= rows; ++row) row_starts[static_cast<size_t>(row)] = static_cast<int32_t>(row);
  for (int64_t row = 0; row < rows; ++row) {
    positions[static_cast<size_t>(row)] = in.positions[in.row_starts[row + 1] - 1] + 1;
    wanted[static_cast<size_t>(row)] = static_cast<int32_t>(row);
  }
  block_tables.assign(static_cast<size_t>(in.num_groups * rows * (in.max_blocks + 1)), 0);
  for (int64_t i = 0; i < in.num_groups * rows; ++i) {
    std::copy_n(in.block_tables + i * in.max_blocks, in.max_blocks, block_tables.data() + i * (in.max_blocks + 1));
  }
  copy(temperature, in.sampling.temperature, rows);
  copy(top_k, in.sampling.top_k, rows);
  copy(top_p, in.sampling.top_p, rows);
  copy(seed, in.sampling.seed, rows);
  copy(prompt_index, in.sampling.prompt_index, rows);
  copy(choice_index, in.sampling.choice_index, rows);
  copy(position, in.sampling.position, rows);
  for (uint64_t& each : position) ++each;
  copy(wants_logprob, in.sampling.wants_logprob, rows);
  drawn.resize(static_cast<size_t>(rows));
  logprobs.resize(static_cast<size_t>(rows));
  step = {rows, rows, rows, 0, in.num_groups, in.max_blocks + 1, token_ids.data(), positions.data(), row_starts.data(),
          block_tables.data(), wanted.data(), nullptr,
          {temperature.data(), top_k.data(), top_p.data(), seed.data(), prompt_index.data(), choice_index.data(),
           position.data(), wants_logprob.data()}};
}

bool Runner::Ahead::has_sampling(const Sampling& asked) const {
  return asked.extras == nullptr && is_same(temperature, asked.temperature) && is_same(top_k, asked.top_k) &&
         is_same(top_p, asked.top_p) && is_same(seed, asked.seed) && is_same(prompt_index, asked.prompt_index) &&
         is_same(choice_index, asked.choice_index) && is_same(position, asked.position) &&
         is_same(wants_logprob, asked.wants_logprob);
}

// One spare block for each KV group of a row that needs one. False if there are not enough.
bool Runner::give_spares() {
  const StepInput& next = ahead_.step;
  int64_t num_given = 0;
  ahead_.spares.clear();
  for (int64_t row = 0; row < next.num_rows; ++row) {
    if (next.positions[row] % kv_.block_size != 0) continue;
    if (num_given + next.num_groups > num_spares_) return false;
    for (int64_t group = 0; group < next.num_groups; ++group) {
      const int64_t entry = (group * next.num_rows + row) * next.max_blocks + next.positions[row] / kv_.block_size;
      ahead_.block_tables[static_cast<size_t>(entry)] = static_cast<int32_t>(kv_.num_blocks + num_given++);
      ahead_.spares.push_back({group, row});
    }
  }
  return true;
}

bool Runner::can_go_ahead(const StepInput& in, const int32_t* drawn) const {
  if (num_spares_ == 0 || is_profiling_ || in.sampling.extras != nullptr) return false;
  if (in.num_rows == 0 || in.num_wanted != in.num_rows) return false;
  for (int64_t row = 0; row < in.num_rows; ++row) {
    const int64_t last = in.row_starts[row + 1] - 1;
    if (last < in.row_starts[row] || in.wanted[row] != last || drawn[row] < 0) return false;
    if (in.positions[last] + int64_t{1} >= compiled_.num_positions) return false;
  }
  return true;
}

void Runner::go_ahead(const StepInput& in, const int32_t* drawn) {
  if (!can_go_ahead(in, drawn)) return;
  try {
    ahead_.take(in, drawn);
    if (!give_spares()) return;
    grow(ahead_.step.num_tokens, ahead_.step.num_wanted);
    take_batch(ahead_.step);
    token_ids_ = ahead_.drawn.data();
    logprobs_ = ahead_.logprobs.data();
    plan();
  } catch (const std::bad_alloc&) {    // what has been drawn stands; the next step begins when it is asked for
    return;
  }
  is_under_way_ = true;
  pool_->start();
}

bool Runner::is_ahead(const StepInput& in) const {
  const StepInput& have = ahead_.step;
  return is_under_way_ && in.num_copies == 0 && in.num_tokens == have.num_tokens && in.num_rows == have.num_rows &&
         in.num_wanted == have.num_wanted && in.num_groups == have.num_groups && is_same(ahead_.token_ids, in.token_ids) &&
         is_same(ahead_.positions, in.positions) && is_same(ahead_.row_starts, in.row_starts) &&
         is_same(ahead_.wanted, in.wanted) && ahead_.has_sampling(in.sampling) && has_blocks_ahead(in);
}

// Whether every row sees the same blocks; instead of a spare one any that there is.
bool Runner::has_blocks_ahead(const StepInput& in) const {
  const StepInput& have = ahead_.step;
  for (int64_t i = 0; i < in.num_groups * in.num_rows; ++i) {
    const int64_t at = have.positions[i % in.num_rows];
    const int64_t window = compiled_.group_windows[static_cast<size_t>(i / in.num_rows)];
    const int64_t end = at / kv_.block_size + 1;
    if (end > in.max_blocks) return false;
    for (int64_t block = first_key_of(at, window) / kv_.block_size; block < end; ++block) {
      const int32_t ours = have.block_tables[i * have.max_blocks + block], asked = in.block_tables[i * in.max_blocks + block];
      if (ours < kv_.num_blocks ? asked != ours : asked < 0 || asked >= kv_.num_blocks) return false;
    }
  }
  return true;
}

void Runner::join_ahead(const StepInput& in, int32_t* token_ids, float* logprobs) {
  pool_->finish();
  is_under_way_ = false;
  ++num_joined_;
  const StepInput& have = ahead_.step;
  for (const Spare& spare : ahead_.spares) {
    const int64_t row = spare.group * in.num_rows + spare.row, block = have.positions[spare.row] / kv_.block_size;
    copy_block(have.block_tables[row * have.max_blocks + block], in.block_tables[row * in.max_blocks + block]);
  }
  std::copy(ahead_.drawn.begin(), ahead_.drawn.end(), token_ids);
  std::copy(ahead_.logprobs.begin(), ahead_.logprobs.end(), logprobs);
}

// Tiles not yet begun are passed over, and so are the operations behind them.
void Runner::leave_ahead() {
  if (!is_under_way_) return;
  is_given_up_.store(true, std::memory_order_relaxed);
  pool_->finish();
  is_given_up_.store(false, std::memory_order_relaxed);
  is_under_way_ = false;
}

}  // namespace paceline
