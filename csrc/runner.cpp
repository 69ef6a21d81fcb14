#include "runner.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <stdexcept>

#if defined(__linux__)
#include <sched.h>
#include <sys/mman.h>
#endif

namespace paceline {

namespace {

constexpr int64_t kFewRows = 48;              // up to here a linear's rows stay together and its strips are shared out
constexpr int64_t kWeightTileBytes = 96 << 10;
constexpr int64_t kMinTileBytes = 24 << 10;   // takes 1 us to read, many times what a claim costs
constexpr int64_t kRowStep = 16;              // rows that kernels take at a time, or a multiple of them
constexpr int64_t kStripStep = 3;             // kernels take 48 outputs at a time
constexpr int64_t kGatedBytes = 16 << 10;     // of gate and up that a thread holds at a time, to find them in its cache
constexpr int64_t kQueriesPerTile = 48;       // query heads of one KV head that share its keys while they are close

std::string text(int64_t number) { return std::to_string(number); }

void require(bool holds, const std::string& why) {
  if (!holds) throw std::invalid_argument(why);
}

KVCache cache_of(const KVSpec& spec) {
  KVCache kv{};
  kv.num_layers = static_cast<int32_t>(spec.num_layers);
  kv.num_kv_heads = static_cast<int32_t>(spec.num_kv_heads);
  kv.head_dim = static_cast<int32_t>(spec.head_dim);
  kv.block_size = static_cast<int32_t>(spec.block_size);
  kv.num_blocks = static_cast<int32_t>(spec.num_blocks);
  kv.is_bf16 = spec.is_bf16;
  kv.bytes_per_block = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.block_size * (spec.is_bf16 ? 2 : 4);
  return kv;
}

int64_t strip_bytes(const Weight& weight) {
  switch (weight.form) {
    case Form::f32: return weight.num_inputs * kStrip * 4;
    case Form::bf16: return weight.num_inputs * kStrip * 2;
    case Form::int8: return weight.num_inputs / kGroup * int8_block_bytes;
    case Form::int4: return weight.num_inputs / kGroup * int4_block_bytes;
  }
  return 1;
}

bool is_integer(Form form) { return form == Form::int8 || form == Form::int4; }

// Strips of gate, and as many of up, that are taken at a time: whole groups for rounding, and what the kernel likes.
int64_t gated_step(Form form) { return is_integer(form) ? kGroup / kStrip : std::lcm(kGroup / kStrip, kStripStep); }

int64_t gated_strips(Form form, int64_t num_rows) {
  const int64_t step = gated_step(form);
  const int64_t bytes = 2 * kStrip * static_cast<int64_t>(sizeof(float)) * num_rows;    // of gate and up, one strip of each
  return std::max(kGatedBytes / bytes / step, int64_t{1}) * step;
}

// Strips [first, last) of a weight, as one of its own.
Weight strips_of(const Weight& weight, int64_t first, int64_t last) {
  Weight part = weight;
  part.data += first * strip_bytes(weight);
  part.num_strips = last - first;
  part.num_outputs = std::min((last - first) * kStrip, weight.num_outputs - first * kStrip);
  return part;
}

// From row `first` on.
Activations rows_from(const Activations& all, int64_t first, int64_t num_inputs) {
  const int64_t at = first * num_inputs;
  Activations rows{};
  if (all.x != nullptr) rows.x = all.x + at;
  if (all.bf16 != nullptr) rows.bf16 = all.bf16 + at;
  if (all.q == nullptr) return rows;
  rows.q = all.q + at;
  rows.scale = all.scale + at / kGroup;
  rows.scaled_sum = all.scaled_sum + at / kGroup;
  rows.start = all.start + at / kGroup;
  return rows;
}

void check_ids(const char* name, const int32_t* ids, int64_t count, int64_t least, int64_t vocab_size) {
  for (int64_t i = 0; i < count; ++i) {
    require(ids[i] >= least && ids[i] < vocab_size,
            std::string(name) + ": token id " + text(ids[i]) + " is outside the vocabulary of " + text(vocab_size));
  }
}

void check_list(const char* name, const Ragged& list, int64_t count, int64_t vocab_size) {
  require(list.starts[0] == 0, std::string(name) + ": starts must begin at 0");
  for (int64_t i = 0; i < count; ++i) {
    require(list.starts[i] <= list.starts[i + 1], std::string(name) + ": starts must not decrease");
  }
  check_ids(name, list.values, list.starts[count], 0, vocab_size);
}

}  // namespace

void check_extras(const SamplingExtras& extras, int64_t num_wanted, int64_t vocab_size) {
  for (int64_t i = 0; i < extras.count; ++i) {
    require(extras.rows[i] > (i == 0 ? -1 : extras.rows[i - 1]) && extras.rows[i] < num_wanted,
            "rows: must be ascending wanted positions below " + text(num_wanted) + ", got " + text(extras.rows[i]));
    require(extras.num_top[i] >= 0 && extras.num_top[i] <= extras.top_width, "num_top: must not be negative");
    require(extras.num_prompt[i] >= 0 && extras.num_prompt[i] <= extras.history.end(i) - extras.history.begin(i),
            "num_prompt: must be at most the length of the history");
  }
  check_ids("target", extras.target, extras.count, -1, vocab_size);
  check_list("history", extras.history, extras.count, vocab_size);
  check_list("allowed", extras.allowed, extras.count, vocab_size);
  check_list("banned", extras.banned, extras.count, vocab_size);
  check_list("biased", extras.biased, extras.count, vocab_size);
}

void Memory::Free::operator()(void* p) const { std::free(p); }

void Memory::reserve(size_t num_bytes) {
  if (num_bytes <= size_) return;
  data_.reset();
  size_ = (num_bytes + 63) / 64 * 64;
  data_.reset(std::aligned_alloc(64, size_));
  if (!data_) {
    size_ = 0;
    throw std::bad_alloc();
  }
}

KVMemory::KVMemory(size_t num_bytes, bool has_early_pages) {
  constexpr size_t huge_page = size_t{2} << 20;
  size_ = (num_bytes + huge_page - 1) / huge_page * huge_page;
#if defined(__linux__)
  void* data = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  madvise(data, size_, MADV_HUGEPAGE);
  data_ = static_cast<uint8_t*>(data);
  if (!has_early_pages) return;
  try {
    toucher_ = std::thread([this] { touch(); });
  } catch (const std::system_error&) {    // no more threads: pages come as they are written
  }
#else
  (void)has_early_pages;    // all are written here
  data_ = static_cast<uint8_t*>(std::aligned_alloc(huge_page, size_));
  if (data_ == nullptr) throw std::bad_alloc();
  std::memset(data_, 0, size_);
#endif
}

// Only where nothing else runs: a thread of the pool that were put aside for this would hold up the step. Adding nothing
// gives a page and changes no byte, whoever writes it meanwhile.
void KVMemory::touch() {
#if defined(__linux__)
  constexpr size_t page = 4096;
  const volatile uint8_t nothing = 0;    // unknown to a compiler that would make a load of the addition
  const sched_param none{};
  if (sched_setscheduler(0, SCHED_IDLE, &none) != 0) return;
  for (size_t at = 0; at < size_ && !stop_.load(std::memory_order_relaxed); at += page) {
    __atomic_fetch_add(data_ + at, nothing, __ATOMIC_RELAXED);
  }
#endif
}

KVMemory::~KVMemory() {
  stop_.store(true);
  if (toucher_.joinable()) {
    if (process_ == process_id()) toucher_.join(); else toucher_.detach();    // a forked process has no such thread
  }
#if defined(__linux__)
  munmap(data_, size_);
#else
  std::free(data_);
#endif
}

Runner::Runner(const KernelTable& kernels, int num_threads, ProgramSpec spec, const KVSpec& kv, bool runs_ahead)
    : kernels_(kernels), spec_(std::move(spec)), compiled_(compile(spec_, kv)), kv_(cache_of(kv)),
      num_spares_(runs_ahead && num_threads > 1 ? kSpareRows * static_cast<int64_t>(compiled_.group_windows.size()) : 0) {
  require(num_threads >= 1 && num_threads <= 1024, "num_threads must be from 1 to 1024, got " + text(num_threads));
  require(num_ops() <= Pool::kMaxOps, "the program has too many nodes");
  kv_memory_ = std::make_unique<KVMemory>(static_cast<size_t>(kv_bytes() + num_spares_ * kv_.bytes_per_block), kv.has_early_pages);
  kv_.data = kv_memory_->data();
  buffers_.resize(spec_.buffers.size());
  prepared_memory_.resize(compiled_.prepared.size());
  prepared_.resize(compiled_.prepared.size());
  tilings_.resize(compiled_.ops.size());
  timers_.resize(compiled_.ops.size());
  totals_ = std::make_unique<std::atomic<int>[]>(compiled_.ops.size());
  sample_scratch_.resize(static_cast<size_t>(num_threads));
  for (Memory& scratch : sample_scratch_) scratch.reserve(kernels_.sample_scratch_bytes(spec_.vocab_size));
  const auto is_gated = [](const Op& op) { return op.kind == Op::gated; };
  if (std::any_of(compiled_.ops.begin(), compiled_.ops.end(), is_gated)) gated_scratch_.resize(sample_scratch_.size());
  for (Memory& scratch : gated_scratch_) {
    constexpr int64_t most = std::max(kGatedBytes / 8, kRowTile * kStrip * std::lcm(kGroup / kStrip, kStripStep));
    scratch.reserve(static_cast<size_t>(most) * 3 * sizeof(float));
  }
  for (const Op& op : compiled_.ops) {
    if (op.kind == Op::sample) logits_buffer_ = op.steps[0].in;
    if (op.linears.size() > expert_tiles_.size()) expert_tiles_.resize(op.linears.size());
  }
  batches_.resize(compiled_.group_windows.size());
  attention_.resize(compiled_.windows.size());
  for (size_t i = 0; i < attention_.size(); ++i) attention_[i].window = compiled_.windows[i];
  pool_ = std::make_unique<Pool>(num_threads, *this);
}

Runner::~Runner() { close(); }

// Waits for a step in progress. A forked process does not: whoever held the lock there has not come along.
void Runner::close() {
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  if (process_ == process_id()) {
    lock.lock();
    leave_ahead();
  }
  pool_.reset();
  kv_memory_.reset();
  buffers_.clear();
  prepared_memory_.clear();
  sample_scratch_.clear();
  gated_scratch_.clear();
  partials_ = Memory();
}

std::unique_lock<std::mutex> Runner::lock_open() const {
  if (process_ != process_id()) {
    throw std::runtime_error("this runner was made before the process forked, and its threads stayed behind; make one here");
  }
  std::unique_lock<std::mutex> lock(mutex_);
  require(pool_ != nullptr, "this runner is closed");
  return lock;
}

void Runner::step(const StepInput& in, int32_t* token_ids, float* logprobs, float* logits) {
  const std::unique_lock<std::mutex> lock = lock_open();
  if (logits == nullptr && is_ahead(in)) {
    join_ahead(in, token_ids, logprobs);
  } else {
    leave_ahead();
    run_step(in, token_ids, logprobs, logits);
  }
  if (logits == nullptr) go_ahead(in, token_ids);
}

void Runner::run_step(const StepInput& in, int32_t* token_ids, float* logprobs, float* logits) {
  pool_->wake();
  check(in);
  require(logits == nullptr || logits_buffer_ >= 0, "logits are wanted, but the program has no sample node");
  grow(in.num_tokens, in.num_wanted);
  take_batch(in);
  token_ids_ = token_ids;
  logprobs_ = logprobs;
  plan();
  copy_blocks(in);    // the first change: nothing from here on can fail
  pool_->run();
  if (logits != nullptr && in.num_wanted > 0) {
    std::memcpy(logits, buffer(logits_buffer_), static_cast<size_t>(in.num_wanted * spec_.vocab_size) * sizeof(float));
  }
}

int64_t Runner::num_joined() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_joined_;
}

void Runner::poison(const int32_t* block_ids, int64_t count) {
  const std::unique_lock<std::mutex> lock = lock_open();
  leave_ahead();
  for (int64_t i = 0; i < count; ++i) {
    require(block_ids[i] >= 0 && block_ids[i] < kv_.num_blocks, "block id " + text(block_ids[i]) + " is out of range");
  }
  for (int64_t i = 0; i < count; ++i) {    // all ones is a NaN in every type
    std::memset(kv_.data + block_ids[i] * kv_.bytes_per_block, 0xff, static_cast<size_t>(kv_.bytes_per_block));
  }
}

// ------------------------------------------------------------------------------------------------------------- the step

void Runner::check(const StepInput& in) const {
  constexpr int64_t most = int64_t{1} << 24;
  require(in.num_tokens <= most && in.num_rows <= most, "too many tokens in a step");
  require(in.num_groups == static_cast<int64_t>(batches_.size()), "block_tables are of " + text(in.num_groups) +
          " groups, the program has " + text(static_cast<int64_t>(batches_.size())));
  require(in.row_starts[0] == 0 && in.row_starts[in.num_rows] == in.num_tokens,
          "row_starts must go from 0 to the number of tokens");
  for (int64_t row = 0; row < in.num_rows; ++row) {
    require(in.row_starts[row] <= in.row_starts[row + 1], "row_starts must not decrease (row " + text(row) + ")");
  }
  for (int64_t row = 0; row < in.num_rows; ++row) check_row(in, row);
  for (int64_t t = 0; t < in.num_tokens; ++t) {
    require(in.token_ids[t] >= 0 && in.token_ids[t] < spec_.vocab_size,
            "token id " + text(in.token_ids[t]) + " is outside the vocabulary of " + text(spec_.vocab_size));
  }
  for (int64_t i = 0; i < in.num_wanted; ++i) {
    require(in.wanted[i] > (i == 0 ? -1 : in.wanted[i - 1]) && in.wanted[i] < in.num_tokens,
            "wanted must be ascending token indices below " + text(in.num_tokens) + ", got " + text(in.wanted[i]));
  }
  if (in.sampling.extras != nullptr) check_extras(*in.sampling.extras, in.num_wanted, spec_.vocab_size);
  for (int64_t i = 0; i < 2 * in.num_copies; ++i) {
    require(in.copies[i] >= 0 && in.copies[i] < kv_.num_blocks,
            "block id " + text(in.copies[i]) + " of a copy is out of range");
  }
}

void Runner::check_row(const StepInput& in, int64_t row) const {
  const int64_t first = in.row_starts[row];
  const int64_t last = in.row_starts[row + 1];
  if (first == last) return;
  for (int64_t t = first; t < last; ++t) {
    require(in.positions[t] >= 0 && in.positions[t] < compiled_.num_positions,
            "position " + text(in.positions[t]) + " is outside the rope table of " + text(compiled_.num_positions));
    require(t == first || in.positions[t] == in.positions[t - 1] + 1,
            "positions of row " + text(row) + " are not consecutive");
  }
  const int64_t num_blocks = in.positions[last - 1] / kv_.block_size + 1;
  require(num_blocks <= in.max_blocks,
          "row " + text(row) + " needs " + text(num_blocks) + " blocks, its table has " + text(in.max_blocks));
  for (int64_t group = 0; group < in.num_groups; ++group) check_blocks(in, row, group);
}

// The blocks that the row's tokens see or write; those behind a window are never read.
void Runner::check_blocks(const StepInput& in, int64_t row, int64_t group) const {
  const int64_t num_blocks = in.positions[in.row_starts[row + 1] - 1] / kv_.block_size + 1;
  const int64_t seen_from = first_key_of(in.positions[in.row_starts[row]], compiled_.group_windows[static_cast<size_t>(group)]);
  const int32_t* table = in.block_tables + (group * in.num_rows + row) * in.max_blocks;
  for (int64_t i = seen_from / kv_.block_size; i < num_blocks; ++i) {
    require(table[i] >= 0 && table[i] < kv_.num_blocks,
            "block id " + text(table[i]) + " of row " + text(row) + " is out of range");
  }
}

void Runner::copy_blocks(const StepInput& in) {
  for (int64_t i = 0; i < in.num_copies; ++i) {
    if (in.copies[2 * i] != in.copies[2 * i + 1]) copy_block(in.copies[2 * i], in.copies[2 * i + 1]);
  }
}

void Runner::copy_block(int64_t from, int64_t to) {
  std::memcpy(kv_.data + to * kv_.bytes_per_block, kv_.data + from * kv_.bytes_per_block,
              static_cast<size_t>(kv_.bytes_per_block));
}

void Runner::take_batch(const StepInput& in) {
  row_of_token_.resize(static_cast<size_t>(in.num_tokens));
  for (int64_t row = 0; row < in.num_rows; ++row) {
    std::fill(row_of_token_.begin() + in.row_starts[row], row_of_token_.begin() + in.row_starts[row + 1],
              static_cast<int32_t>(row));
  }
  batch_ = {static_cast<int32_t>(in.num_tokens), static_cast<int32_t>(in.num_rows), static_cast<int32_t>(in.num_wanted),
            static_cast<int32_t>(in.max_blocks), in.token_ids, in.positions, in.row_starts, row_of_token_.data(),
            in.block_tables, in.wanted};
  for (size_t group = 0; group < batches_.size(); ++group) {
    batches_[group] = batch_;
    batches_[group].block_tables += static_cast<int64_t>(group) * in.num_rows * in.max_blocks;
  }
  sampling_ = in.sampling;
  reserve_routes();
}

// Buffers grow to the largest step seen and stay so: the engine's token budget is their limit.
void Runner::grow(int64_t num_tokens, int64_t num_wanted) {
  if (num_tokens <= capacity_tokens_ && num_wanted <= capacity_wanted_) return;
  const int64_t tokens = std::max(capacity_tokens_, ceil_div(num_tokens, 16) * 16);
  const int64_t wanted = std::max(capacity_wanted_, ceil_div(num_wanted, 16) * 16);
  capacity_tokens_ = capacity_wanted_ = 0;    // if memory runs out below, the next step starts over
  const auto capacity = [&](int index) {
    const Rows rows = spec_.buffers[static_cast<size_t>(index)].rows;
    if (rows == Rows::wanted) return static_cast<size_t>(wanted);
    return static_cast<size_t>(rows == Rows::tokens ? tokens : tokens * compiled_.experts_per_token);
  };
  for (size_t i = 0; i < buffers_.size(); ++i) {
    buffers_[i].reserve(capacity(static_cast<int>(i)) * static_cast<size_t>(spec_.buffers[i].width) * sizeof(float));
  }
  for (size_t i = 0; i < prepared_.size(); ++i) {
    const PreparedSpec& spec = compiled_.prepared[i];
    const size_t rows = capacity(spec.buffer);
    const size_t inputs = static_cast<size_t>(width(spec.buffer));
    Activations& to = prepared_[i];
    to.x = buffer(spec.buffer);
    if (spec.form == Form::bf16) {
      prepared_memory_[i].reserve(rows * inputs * 2);
      to.bf16 = prepared_memory_[i].as<uint16_t>();
      continue;
    }
    const size_t groups = inputs / kGroup;
    prepared_memory_[i].reserve(rows * (inputs + 12 * groups) + 4 * 64);
    const auto align = [](uint8_t* p) { return p + (64 - reinterpret_cast<uintptr_t>(p) % 64) % 64; };
    uint8_t* at = prepared_memory_[i].as<uint8_t>();
    to.q = reinterpret_cast<int8_t*>(at);
    at = align(at + rows * inputs);
    to.scale = reinterpret_cast<float*>(at);
    at = align(at + rows * groups * 4);
    to.scaled_sum = reinterpret_cast<float*>(at);
    at = align(at + rows * groups * 4);
    to.start = reinterpret_cast<int32_t*>(at);
  }
  capacity_tokens_ = tokens;
  capacity_wanted_ = wanted;
}

// --------------------------------------------------------------------------------------------------------------- tiles
// No choice here can change a bit of any result.

void Runner::plan() {
  const int64_t threads = pool_->num_threads();
  for (AttentionPlan& each : attention_) plan_attention(each);
  for (size_t i = 0; i < compiled_.ops.size(); ++i) {
    const Op& op = compiled_.ops[i];
    const int64_t num_rows = this->num_rows(op.of);
    Tiling& tiling = tilings_[i];
    int64_t total = 0;
    switch (op.kind) {
      case Op::rows:
        tiling.rows_per_tile = std::clamp<int64_t>(ceil_div(num_rows, threads * 4), threads == 1 ? 16 : 2, 16);
        total = ceil_div(num_rows, tiling.rows_per_tile);
        break;
      case Op::linear:
        if (num_rows == 0) break;
        tiling = tile_linear(*op.steps[0].weight, num_rows, threads * kTilesPerThread);
        total = tiling.total;
        break;
      case Op::gated:
        if (num_rows == 0) break;
        tiling = tile_gated(*op.steps[0].weight, num_rows);
        total = tiling.total;
        break;
      case Op::attend: total = static_cast<int64_t>(attention_of(op).job_groups.size()) - 1; break;
      case Op::merge: total = static_cast<int64_t>(attention_of(op).merges.size()); break;
      case Op::sort: total = num_rows > 0 ? 1 : 0; break;
      case Op::expert_linear: break;    // the sort before it says
      case Op::sample: total = num_rows; break;
    }
    require(total <= Pool::kMaxTiles, "too many tokens in a step");
    totals_[i].store(static_cast<int>(total), std::memory_order_relaxed);
  }
}

// Into num_tiles tiles where the rows are few.
Runner::Tiling Runner::tile_linear(const Weight& weight, int64_t num_rows, int64_t num_tiles) const {
  return tile_strips(weight.num_strips, strip_bytes(weight), kStripStep, num_rows, num_tiles);
}

// A strip of gate and one of up count as one.
Runner::Tiling Runner::tile_gated(const Weight& weight, int64_t num_rows) const {
  return tile_strips(weight.num_strips / 2, 2 * strip_bytes(weight), gated_step(weight.form), num_rows,
                     pool_->num_threads() * kTilesPerThread);
}

Runner::Tiling Runner::tile_strips(int64_t strips, int64_t bytes, int64_t step, int64_t num_rows, int64_t num_tiles) const {
  Tiling tiling{};
  int64_t num_parts = 1;
  if (num_rows <= kFewRows) {
    tiling.rows_per_tile = tiling.rows_per_part = num_rows;
    tiling.strips_per_tile = std::max(ceil_div(strips, num_tiles), ceil_div(kMinTileBytes, bytes));
  } else {
    num_parts = std::clamp<int64_t>(num_rows / kRowTile, 1, pool_->num_threads());
    tiling.rows_per_tile = kRowTile;
    tiling.rows_per_part = ceil_div(num_rows, num_parts * kRowStep) * kRowStep;
    tiling.strips_per_tile = std::max<int64_t>(kWeightTileBytes / bytes, 1);
  }
  tiling.strips_per_tile = ceil_div(tiling.strips_per_tile, step) * step;
  if (pool_->num_threads() == 1 && num_rows <= kFewRows) tiling.strips_per_tile = strips;
  tiling.total = num_parts * ceil_div(strips, tiling.strips_per_tile) * ceil_div(tiling.rows_per_part, tiling.rows_per_tile);
  return tiling;
}

const Runner::AttentionPlan& Runner::attention_of(const Op& op) const {
  return attention_[static_cast<size_t>(op.steps[0].plan)];
}

void Runner::plan_attention(AttentionPlan& plan) {
  plan.jobs.clear();
  plan.merges.clear();
  plan.num_partials = 0;
  find_row_tiles(plan);
  const int64_t kv_heads = spec_.num_kv_heads;
  const int64_t threads = pool_->num_threads();
  const bool is_many = static_cast<int64_t>(plan.row_tiles.size()) >= 4 * threads;
  int64_t total = 0;
  for (const RowTile& tile : plan.row_tiles) total += tile.cost() * kv_heads;
  const int64_t target = std::max<int64_t>(total / (threads * 4), 1);
  for (const RowTile& tile : plan.row_tiles) {
    const int64_t queries = (tile.last - tile.first) * spec_.num_heads;
    const bool is_whole = (is_many || threads == 1) && queries <= kMaxQueries && tile.last - tile.first <= 4;
    const int64_t heads_per_job = is_whole ? kv_heads : 1;
    const int64_t segments = ceil_div(tile.num_keys, kSegment) - tile.first_segment();
    add_jobs(plan, tile, heads_per_job, threads == 1 ? 1 : std::min(segments, ceil_div(tile.cost() * heads_per_job, target)));
  }
  group_jobs(plan, target);
  partials_.reserve(static_cast<size_t>(plan.num_partials) * sizeof(float));
}

void Runner::find_row_tiles(AttentionPlan& plan) const {
  plan.row_tiles.clear();
  const int32_t tile_tokens = static_cast<int32_t>(std::max<int64_t>(kQueriesPerTile / group(), 1));
  for (int32_t row = 0; row < batch_.num_rows; ++row) {
    for (int32_t first = batch_.row_starts[row]; first < batch_.row_starts[row + 1]; first += tile_tokens) {
      const int32_t last = std::min(first + tile_tokens, batch_.row_starts[row + 1]);
      plan.row_tiles.push_back({row, first, last, first_key_of(batch_.positions[first], plan.window),
                                batch_.positions[last - 1] + int64_t{1}});
    }
  }
}

// One job for every `heads_per_job` heads and each of `num_pieces` runs of segments. More than one piece: each segment
// leaves a partial, and every token is merged by an operation of its own.
void Runner::add_jobs(AttentionPlan& plan, const RowTile& tile, int64_t heads_per_job, int64_t num_pieces) const {
  const int64_t base = tile.first_segment();
  const int64_t segments = ceil_div(tile.num_keys, kSegment) - base;
  const int64_t partial_size = kPartialHead + spec_.head_dim;
  for (int64_t head = 0; head < spec_.num_kv_heads; head += heads_per_job) {
    for (int64_t piece = 0; piece < num_pieces; ++piece) {
      AttendJob job{};
      job.row = tile.row;
      job.first = tile.first;
      job.last = tile.last;
      job.first_head = static_cast<int32_t>(head);
      job.last_head = static_cast<int32_t>(std::min(head + heads_per_job, spec_.num_kv_heads));
      job.first_segment = static_cast<int32_t>(base + segments * piece / num_pieces);
      job.last_segment = static_cast<int32_t>(base + segments * (piece + 1) / num_pieces);
      job.next_row = -1;
      job.partial = num_pieces > 1 ? plan.num_partials : -1;
      job.partial_segments = static_cast<int32_t>(segments);
      job.base_segment = static_cast<int32_t>(base);
      job.window = plan.window;
      plan.jobs.push_back(job);
    }
  }
  if (num_pieces == 1) return;
  for (int32_t token = tile.first; token < tile.last; ++token) {
    const int64_t position = batch_.positions[token];
    const int64_t skipped = first_key_of(position, plan.window) / kSegment - base;    // segments that the token has left behind
    plan.merges.push_back({token, static_cast<int32_t>(position / kSegment + 1 - base - skipped), static_cast<int32_t>(segments),
                           plan.num_partials + skipped * partial_size});
    plan.num_partials += spec_.num_heads * segments * partial_size;
  }
}

int64_t Runner::job_cost(const AttendJob& job) const {
  const int64_t num_keys = batch_.positions[job.last - 1] + 1;
  const int64_t end = std::min<int64_t>(num_keys, int64_t{job.last_segment} * kSegment);
  const int64_t begin = std::max(int64_t{job.first_segment} * kSegment, first_key_of(batch_.positions[job.first], job.window));
  return (job.last - job.first) * (job.last_head - job.first_head) * (end - begin);
}

// Neighbouring jobs form a tile until they cost about `target`. A job knows which row comes next, also in the next tile:
// the pool gives neighbours to one thread.
void Runner::group_jobs(AttentionPlan& plan, int64_t target) const {
  std::vector<AttendJob>& jobs = plan.jobs;
  plan.job_groups.assign(1, 0);
  int64_t cost = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    cost += job_cost(jobs[i]);
    const bool ends = i + 1 == jobs.size() || 2 * cost + job_cost(jobs[i + 1]) > 2 * target;
    if (i + 1 < jobs.size() && jobs[i + 1].row != jobs[i].row) jobs[i].next_row = jobs[i + 1].row;
    if (!ends) continue;
    plan.job_groups.push_back(static_cast<int32_t>(i + 1));
    cost = 0;
  }
}

// ----------------------------------------------------------------------------------------------------------- operations

void Runner::run(int index, int tile, int thread) {
  if (is_given_up_.load(std::memory_order_relaxed)) return;
  const Op& op = compiled_.ops[static_cast<size_t>(index)];
  const Tiling& tiling = tilings_[static_cast<size_t>(index)];
  const Step& step = op.steps[0];
  switch (op.kind) {
    case Op::rows: {
      const int64_t first = tile * tiling.rows_per_tile;
      const int64_t last = std::min(first + tiling.rows_per_tile, num_rows(op.of));
      for (const Step& each : op.steps) run_rows(each, first, last);
      break;
    }
    case Op::linear: run_linear(step, *step.weight, tiling, tile, 0, num_rows(op.of)); break;
    case Op::gated: run_gated(op, tiling, tile, thread); break;
    case Op::attend: {
      const AttentionPlan& plan = attention_of(op);
      for (int32_t i = plan.job_groups[static_cast<size_t>(tile)]; i < plan.job_groups[static_cast<size_t>(tile) + 1]; ++i) {
        const AttendJob& job = plan.jobs[static_cast<size_t>(i)];
        kernels_.attend(buffer(step.in), kv_, step.layer, static_cast<int32_t>(spec_.num_heads), step.scale, step.softcap,
                        batches_[static_cast<size_t>(step.kv_group)], job, buffer(step.out),
                        job.partial < 0 ? nullptr : partials_.as<float>());
      }
      break;
    }
    case Op::merge: {
      const MergeJob& job = attention_of(op).merges[static_cast<size_t>(tile)];
      kernels_.merge_segments(partials_.as<float>() + job.partial, job.partial_segments, job.num_segments, kv_.head_dim, 0,
                              static_cast<int32_t>(spec_.num_heads), buffer(step.out) + job.token * width(step.out));
      break;
    }
    case Op::sort: sort_routes(op); break;
    case Op::expert_linear: run_expert_linear(op, tile); break;
    case Op::sample: run_sample(step, tile, thread); break;
  }
}

void Runner::run_rows(const Step& step, int64_t first, int64_t last) {
  float* out = step.out < 0 ? nullptr : buffer(step.out);
  const float* in = step.in < 0 ? nullptr : buffer(step.in);
  switch (step.verb) {
    case Verb::embed: return kernels_.embed(*step.weight, batch_.token_ids, out, first, last);
    case Verb::rms_norm: return kernels_.rms_norm(in, step.array, step.eps, out, width(step.in), first, last);
    case Verb::layer_norm:
      return kernels_.layer_norm(in, step.array, step.bias, step.eps, out, width(step.in), first, last);
    case Verb::rms_norm_slices:
      return kernels_.rms_norm_slices(out, step.array, step.eps, width(step.out), step.out_column, step.width, step.count,
                                      first, last);
    case Verb::silu_mul: return kernels_.silu_mul(in, out, width(step.out), first, last);
    case Verb::gelu_tanh_mul: return kernels_.gelu_tanh_mul(in, out, width(step.out), first, last);
    case Verb::add: return kernels_.add(out, buffer(step.in2), step.scale, width(step.out), first, last);
    case Verb::add_gated:
      return kernels_.add_gated(out, buffer(step.in2), buffer(step.in3), width(step.out), first, last);
    case Verb::route: return kernels_.route(in, step.width, step.count, step.renormalises, out, first, last);
    case Verb::gather_routed: return gather_routed(step, first, last);
    case Verb::combine_routed:
      return kernels_.combine(in, buffer(step.in2), row_of_choice_.data(), step.count, width(step.out), out, first, last);
    case Verb::scale: return kernels_.scale(out, step.scale, width(step.out), first, last);
    case Verb::softcap: return kernels_.softcap(out, step.scale, width(step.out), first, last);
    case Verb::rope_write_kv:
      return kernels_.rope_write_kv(in, step.array, static_cast<int32_t>(step.width), out, kv_, step.layer,
                                    static_cast<int32_t>(spec_.num_heads), batches_[static_cast<size_t>(step.kv_group)],
                                    first, last);
    case Verb::prepare: {
      const size_t prepared = static_cast<size_t>(step.prepared);
      return kernels_.prepare(compiled_.prepared[prepared].form, in, prepared_[prepared], width(step.in), first, last);
    }
    case Verb::select_wanted:
      for (int64_t i = first; i < last; ++i) {
        std::memcpy(out + i * width(step.out), in + batch_.wanted[i] * width(step.in),
                    static_cast<size_t>(width(step.in)) * sizeof(float));
      }
      return;
    default: return;    // not a verb over rows
  }
}

// What a tile of rows [first, last) is. Of the last part's tiles some may be empty: it may have fewer rows.
Runner::Part Runner::part_of(const Tiling& tiling, int64_t num_strips, int tile, int64_t first, int64_t last) {
  const int64_t row_tiles = ceil_div(tiling.rows_per_part, tiling.rows_per_tile);    // of a part
  const int64_t part_tiles = row_tiles * ceil_div(num_strips, tiling.strips_per_tile);
  const int64_t first_strip = tile % part_tiles / row_tiles * tiling.strips_per_tile;
  const int64_t part_row = first + tile / part_tiles * tiling.rows_per_part;
  const int64_t first_row = part_row + tile % row_tiles * tiling.rows_per_tile;
  const int64_t last_row = std::min({first_row + tiling.rows_per_tile, part_row + tiling.rows_per_part, last});
  return {first_row, last_row, first_strip, std::min(first_strip + tiling.strips_per_tile, num_strips)};
}

Activations Runner::input_of(const Step& linear) const {
  Activations activations{};
  activations.x = buffer(linear.in);
  if (linear.prepared >= 0) activations = prepared_[static_cast<size_t>(linear.prepared)];
  return activations;
}

// One tile of rows [first, last) times the weight.
void Runner::run_linear(const Step& step, const Weight& weight, const Tiling& tiling, int tile, int64_t first, int64_t last) {
  const Part part = part_of(tiling, weight.num_strips, tile, first, last);
  if (part.is_empty()) return;
  kernels_.linear(weight, input_of(step), step.bias, buffer(step.out) + step.out_column, width(step.out), part.first_row,
                  part.last_row, part.first_strip, part.last_strip);
}

// Some strips of gate and the same of up at a time, into the thread's own memory, from where their product is rounded.
void Runner::run_gated(const Op& op, const Tiling& tiling, int tile, int thread) {
  const Step &linear = op.steps[0], &activation = op.steps[1], &rounding = op.steps[2];
  const Weight& weight = *linear.weight;
  const int64_t inner = width(activation.out), half = weight.num_strips / 2;
  const Part part = part_of(tiling, half, tile, 0, num_rows(op.of));
  if (part.is_empty()) return;
  const int64_t rows = part.last_row - part.first_row, step = gated_strips(weight.form, rows);
  const Activations input = rows_from(input_of(linear), part.first_row, weight.num_inputs);
  const auto multiply = activation.verb == Verb::silu_mul ? kernels_.silu_mul : kernels_.gelu_tanh_mul;
  const size_t prepared = static_cast<size_t>(rounding.prepared);
  float* const gate_up = gated_scratch_[static_cast<size_t>(thread)].as<float>();
  for (int64_t first = part.first_strip; first < part.last_strip; first += step) {
    const int64_t strips = std::min(step, part.last_strip - first), columns = strips * kStrip;
    for (const int64_t side : {0, 1}) {
      const int64_t at = side * half + first;
      kernels_.linear(strips_of(weight, at, at + strips), input, linear.bias == nullptr ? nullptr : linear.bias + at * kStrip,
                      gate_up + side * columns, 2 * columns, 0, rows, 0, strips);
    }
    float* const product = gate_up + rows * 2 * columns;
    multiply(gate_up, product, columns, 0, rows);
    kernels_.prepare_columns(compiled_.prepared[prepared].form, product, prepared_[prepared], inner, first * kStrip, columns,
                             part.first_row, part.last_row);
  }
}

void Runner::run_sample(const Step& step, int64_t row, int thread) {
  token_ids_[row] = kernels_.sample(buffer(step.in) + row * spec_.vocab_size, spec_.vocab_size, sampling_, row, logprobs_ + row,
                                    sample_scratch_[static_cast<size_t>(thread)].as<void>());
}

// -------------------------------------------------------------------------------------------------------------- profile

void Runner::profile(bool enable) {
  const std::lock_guard<std::mutex> lock(mutex_);
  leave_ahead();
  is_profiling_ = enable;
  if (enable) timers_.assign(timers_.size(), Timer{});
}

void Runner::entered(int op) {
  if (!is_profiling_) return;
  const auto now = std::chrono::steady_clock::now();
  if (timed_op_ >= 0) {
    Timer& timer = timers_[static_cast<size_t>(timed_op_)];
    timer.seconds += std::chrono::duration<double>(now - timed_since_).count();
    ++timer.calls;
  }
  timed_op_ = op;
  timed_since_ = now;
}

std::vector<ProfileLine> Runner::profile_report() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<ProfileLine> lines;
  for (size_t i = 0; i < compiled_.ops.size(); ++i) {
    const std::string& label = compiled_.ops[i].label;
    auto line = std::find_if(lines.begin(), lines.end(), [&](const ProfileLine& other) { return other.label == label; });
    if (line == lines.end()) line = lines.insert(lines.end(), ProfileLine{label, 0, 0.0});
    line->calls += timers_[i].calls;
    line->seconds += timers_[i].seconds;
  }
  return lines;
}

}  // namespace paceline
