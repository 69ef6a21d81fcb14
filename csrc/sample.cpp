// The next token of one row of logits. The rules, which paceline/ops/numpy_sampler.py states again in numpy:
//
//   temperature 0 (or a scaled maximum that is not finite): the largest logit, ties to the lowest id.
//   Otherwise scaled = logit / temperature. top_k keeps the k largest, ties at the k-th to the lowest ids. top_p keeps, of
//   those, the shortest run in the order (scaled descending, id ascending) whose share of the probability is at least
//   top_p, and never fewer than one. Of what is kept, in id order, the first whose cumulative weight exceeds u * total.
//
// Nothing is sorted. A threshold below the maximum picks candidates, and radix selection on the bits of a float finds the
// value at which top_k or top_p cuts, exactly, in time linear in the candidates. Weights are e^(scaled - max) in f32, their
// sums are in double and over fixed runs in id order.
#include "simd.h"
#include "units.h"

namespace paceline {
namespace PACELINE_ISA {

namespace {

constexpr int64_t kSmall = 64;      // ids that share a maximum
constexpr int64_t kBlock = 1024;    // ids that share a partial sum
constexpr int kLanes = 16;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Candidates {
  float* scaled;
  float* weight;
  int32_t* id;       // ascending
  int64_t count;
};

struct Scratch {
  float* small_max;      // [vocab / 64]
  double* block_sum;     // [vocab / 1024]
  Candidates all;        // [vocab + 16]
  int32_t* rank_a;       // [vocab] work space of the selection
  int32_t* rank_b;
};

template <typename T> T* carve(uint8_t*& at, int64_t count) {
  T* taken = reinterpret_cast<T*>(at);
  at += ceil_div(count * static_cast<int64_t>(sizeof(T)), 64) * 64;
  return taken;
}

Scratch carve_scratch(uint8_t* at, int64_t vocab_size, size_t* num_bytes) {
  uint8_t* const begin = at;
  Scratch s;
  s.small_max = carve<float>(at, ceil_div(vocab_size, kSmall));
  s.block_sum = carve<double>(at, ceil_div(vocab_size, kBlock));
  s.all.scaled = carve<float>(at, vocab_size + kLanes);
  s.all.weight = carve<float>(at, vocab_size + kLanes);
  s.all.id = carve<int32_t>(at, vocab_size);
  s.all.count = 0;
  s.rank_a = carve<int32_t>(at, vocab_size);
  s.rank_b = carve<int32_t>(at, vocab_size);
  *num_bytes = static_cast<size_t>(at - begin);
  return s;
}

bool is_finite(float a) { return a - a == 0.0f; }

// Natural logarithm of a normal positive number, to about one unit in the last place.
double log_of(double a) {
  uint64_t raw;
  memcpy(&raw, &a, 8);
  int64_t exponent = static_cast<int64_t>(raw >> 52) - 1023;
  raw = (raw & 0xfffffffffffffull) | 0x3ff0000000000000ull;
  double m;
  memcpy(&m, &raw, 8);
  if (m > 1.4142135623730951) { m *= 0.5; ++exponent; }
  const double t = (m - 1.0) / (m + 1.0);
  const double t2 = t * t;
  double series = 0.0;
  for (int n = 21; n >= 1; n -= 2) series = series * t2 + 1.0 / n;
  return 2.0 * t * series + static_cast<double>(exponent) * 0.6931471805599453;
}

// ------------------------------------------------------------------------------------------------------------- maximum

// Maxima of every 64 logits. False: a NaN is among them.
bool find_maxima(const float* logits, int64_t vocab_size, float* small_max) {
  uint32_t bad = 0;
  for (int64_t begin = 0; begin < vocab_size; begin += kSmall) {
    f32x16 most = set1(-__builtin_inff());
    mask16 ordered = first_lanes(kLanes);
    const int64_t end = begin + kSmall < vocab_size ? begin + kSmall : vocab_size;
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      const f32x16 x = load(logits + i);
      ordered = mask_and(ordered, equal(x, x));
      most = max(x, most);
    }
    if (i < end) {
      const int n = static_cast<int>(end - i);
      const f32x16 x = select(first_lanes(n), load_first(logits + i, n), set1(-__builtin_inff()));
      ordered = mask_and(ordered, equal(x, x));
      most = max(x, most);
    }
    bad |= bits(ordered) ^ 0xffffu;
#if defined(PACELINE_ISA_AVX512)
    small_max[begin / kSmall] = _mm512_reduce_max_ps(most.v);
#else
    small_max[begin / kSmall] = reduce_max(most);
#endif
  }
  return bad == 0;
}

float largest_of(const float* values, int64_t count) {
  float most = values[0];
  for (int64_t i = 1; i < count; ++i) most = values[i] > most ? values[i] : most;
  return most;
}

int32_t first_equal(const float* logits, int64_t vocab_size, const float* small_max, float value) {
  int64_t small = 0;
  while (small_max[small] != value) ++small;
  int64_t id = small * kSmall;
  while (id < vocab_size && logits[id] != value) ++id;
  return static_cast<int32_t>(id);
}

// --------------------------------------------------------------------------------------------------------------- sums

// weight[i] = e^(x[i] / temperature - most) over n <= 1024 values; writes up to 15 further weights of 0. Returns the sum.
double weigh_block(const float* x, int64_t n, float temperature, float most, float* weight) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int left = static_cast<int>(n - i < kLanes ? n - i : kLanes);
    const f32x16 scaled = div(load_first(x + i, left), set1(temperature));
    const f32x16 e = exp(sub(scaled, set1(most)));
    store(weight + i, select(first_lanes(left), e, zero()));
  }
  double lanes[kLanes] = {0};
  for (int64_t i = 0; i < n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += static_cast<double>(weight[i + lane]);
  }
  double sum = 0.0;
  for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
  return sum;
}

// Partial sums of e^(logit / temperature - most), block by block, and their total in order.
double weigh_all(const float* logits, int64_t vocab_size, float temperature, float most, double* block_sum) {
  float weight[kBlock];
  double total = 0.0;
  for (int64_t begin = 0; begin < vocab_size; begin += kBlock) {
    const int64_t n = vocab_size - begin < kBlock ? vocab_size - begin : kBlock;
    block_sum[begin / kBlock] = weigh_block(logits + begin, n, temperature, most, weight);
    total += block_sum[begin / kBlock];
  }
  return total;
}

float log_probability(const float* logits, int64_t vocab_size, float most, int32_t id, double* block_sum) {
  const double total = weigh_all(logits, vocab_size, 1.0f, most, block_sum);
  return static_cast<float>(static_cast<double>(logits[id]) - static_cast<double>(most) - log_of(total));
}

// ---------------------------------------------------------------------------------------------------------- randomness

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011).
void philox(uint32_t x[4], uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = 0xD2511F53ull * x[0];
    const uint64_t b = 0xCD9E8D57ull * x[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ x[1] ^ k0, static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ x[3] ^ k1, static_cast<uint32_t>(a)};
    memcpy(x, next, sizeof(next));
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

// Uniform in [0, 1), 53 bits.
double draw(const Sampling& s, int64_t index) {
  uint32_t x[4] = {static_cast<uint32_t>(s.position[index]), static_cast<uint32_t>(s.position[index] >> 32),
                   s.prompt_index[index], s.choice_index[index]};
  philox(x, static_cast<uint32_t>(s.seed[index]), static_cast<uint32_t>(s.seed[index] >> 32));
  const uint64_t mantissa = (static_cast<uint64_t>(x[0]) << 21) ^ (x[1] >> 11);
  return static_cast<double>(mantissa) * 0x1p-53;
}

// ----------------------------------------------------------------------------------------------------------- selection

// Larger float, larger key. Scaled values hold no -0 and no NaN.
uint32_t key_of(float a) {
  uint32_t raw;
  memcpy(&raw, &a, 4);
  return raw & 0x80000000u ? ~raw : raw | 0x80000000u;
}

// Where a kept set ends in the order (scaled descending, id ascending): everything above `value`, and the first
// `num_ties` that equal it.
struct Cut {
  uint32_t key;
  int64_t num_ties;
};

// The shortest run whose count (weight null) or weight reaches `need`; at least one, at most all.
Cut find_cut(const Candidates& c, const float* weight, double need, const Scratch& scratch) {
  constexpr int kShifts[3] = {21, 10, 0};
  constexpr int kBits[3] = {11, 11, 10};
  const int32_t* items = nullptr;    // null: all
  int64_t count = c.count;
  double above = 0.0;
  uint32_t key = 0;
  for (int level = 0; level < 3; ++level) {
    double bins[2048];
    const int num_bins = 1 << kBits[level];
    const uint32_t mask = static_cast<uint32_t>(num_bins) - 1;
    memset(bins, 0, sizeof(double) * static_cast<size_t>(num_bins));
    for (int64_t i = 0; i < count; ++i) {
      const int32_t at = items == nullptr ? static_cast<int32_t>(i) : items[i];
      bins[key_of(c.scaled[at]) >> kShifts[level] & mask] += weight == nullptr ? 1.0 : static_cast<double>(weight[at]);
    }
    int bin = num_bins - 1;
    int lowest = -1;     // lowest bin that held anything: rounding may leave the sum of all just short of `need`
    for (; bin >= 0; --bin) {
      if (bins[bin] == 0.0) continue;
      lowest = bin;
      if (above + bins[bin] >= need) break;
      above += bins[bin];
    }
    if (bin < 0) { bin = lowest; above -= bins[bin]; }
    key |= static_cast<uint32_t>(bin) << kShifts[level];
    int32_t* kept = level % 2 == 0 ? scratch.rank_a : scratch.rank_b;
    int64_t num_kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t at = items == nullptr ? static_cast<int32_t>(i) : items[i];
      if ((key_of(c.scaled[at]) >> kShifts[level] & mask) == static_cast<uint32_t>(bin)) kept[num_kept++] = at;
    }
    items = kept;
    count = num_kept;
  }
  int64_t num_ties = 1;
  const double each = weight == nullptr ? 1.0 : static_cast<double>(weight[items[0]]);
  for (above += each; num_ties < count && above < need; above += each) ++num_ties;
  return {key, num_ties};
}

// Drops what lies past the cut; the order by id stays.
void keep(Candidates& c, Cut cut) {
  int64_t count = 0;
  for (int64_t i = 0; i < c.count; ++i) {
    const uint32_t key = key_of(c.scaled[i]);
    if (key < cut.key || (key == cut.key && cut.num_ties-- <= 0)) continue;
    c.scaled[count] = c.scaled[i];
    c.weight[count] = c.weight[i];
    c.id[count] = c.id[i];
    ++count;
  }
  c.count = count;
}

double total_weight(const Candidates& c) {
  double total = 0.0;
  for (int64_t i = 0; i < c.count; ++i) total += static_cast<double>(c.weight[i]);
  return total;
}

// All ids with scaled >= threshold, with their weights.
void gather(const float* logits, int64_t vocab_size, const float* small_max, float temperature, float most,
            float threshold, Candidates& c) {
  c.count = 0;
  for (int64_t begin = 0; begin < vocab_size; begin += kSmall) {
    if (small_max[begin / kSmall] / temperature < threshold) continue;
    const int64_t end = begin + kSmall < vocab_size ? begin + kSmall : vocab_size;
    for (int64_t i = begin; i < end; ++i) {
      const float scaled = logits[i] / temperature + 0.0f;    // + 0: no -0 may reach key_of
      c.scaled[c.count] = scaled;
      c.id[c.count] = static_cast<int32_t>(i);
      c.count += scaled >= threshold;
    }
  }
  for (int64_t i = 0; i < c.count; i += kLanes) {
    const int left = static_cast<int>(c.count - i < kLanes ? c.count - i : kLanes);
    store(c.weight + i, exp(sub(load_first(c.scaled + i, left), set1(most))));
  }
}

// The candidates that top_k and top_p leave. Thresholds widen until they hold all that the limits can keep.
void gather_kept(const float* logits, int64_t vocab_size, float temperature, float most, int64_t top_k, double top_p,
                 Scratch& scratch) {
  constexpr float kDistances[4] = {4.0f, 8.0f, 16.0f, __builtin_inff()};
  const bool has_k = top_k > 0 && top_k < vocab_size;
  double need = 0.0;
  if (!has_k) need = top_p * weigh_all(logits, vocab_size, temperature, most, scratch.block_sum);
  Candidates& c = scratch.all;
  for (float distance : kDistances) {
    gather(logits, vocab_size, scratch.small_max, temperature, most, most - distance, c);
    if (has_k ? c.count >= top_k : total_weight(c) >= need) break;
  }
  if (has_k) {
    keep(c, find_cut(c, nullptr, static_cast<double>(top_k), scratch));
    need = top_p * total_weight(c);
  }
  if (top_p < 1.0) keep(c, find_cut(c, c.weight, need, scratch));
}

// ---------------------------------------------------------------------------------------------------------------- draw

// First of the n weights at which the running sum passes `target`; the last that weighs anything if none does.
int64_t walk(const float* weight, int64_t n, double sum, double target) {
  int64_t chosen = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (weight[i] == 0.0f) continue;
    chosen = i;
    sum += static_cast<double>(weight[i]);
    if (sum > target) break;
  }
  return chosen;
}

int32_t draw_from_all(const float* logits, int64_t vocab_size, float temperature, float most, double u, Scratch& scratch) {
  const double target = u * weigh_all(logits, vocab_size, temperature, most, scratch.block_sum);
  double sum = 0.0;
  int64_t block = 0;
  int64_t last = 0;    // the last block that weighs anything so far
  double sum_before_last = 0.0;
  for (; block * kBlock < vocab_size; ++block) {
    if (scratch.block_sum[block] == 0.0) continue;
    last = block;
    sum_before_last = sum;
    sum += scratch.block_sum[block];
    if (sum > target) break;
  }
  float weight[kBlock];
  const int64_t begin = last * kBlock;
  const int64_t n = vocab_size - begin < kBlock ? vocab_size - begin : kBlock;
  weigh_block(logits + begin, n, temperature, most, weight);
  return static_cast<int32_t>(begin + walk(weight, n, sum_before_last, target));
}

int32_t draw_token(const float* logits, int64_t vocab_size, float temperature, float most, const Sampling& sampling,
                   int64_t index, Scratch& scratch) {
  const double u = draw(sampling, index);
  const int64_t top_k = sampling.top_k[index];
  const double top_p = static_cast<double>(sampling.top_p[index]);
  if ((top_k <= 0 || top_k >= vocab_size) && top_p >= 1.0) {
    return draw_from_all(logits, vocab_size, temperature, most, u, scratch);
  }
  gather_kept(logits, vocab_size, temperature, most, top_k, top_p, scratch);
  const Candidates& c = scratch.all;
  return c.id[walk(c.weight, c.count, 0.0, u * total_weight(c))];
}

}  // namespace

size_t sample_scratch_bytes(int64_t vocab_size) {
  alignas(64) uint8_t nothing[64];
  size_t num_bytes;
  carve_scratch(nothing, vocab_size, &num_bytes);
  return num_bytes;
}

int32_t sample(const float* logits, int64_t vocab_size, const Sampling& sampling, int64_t index, float* logprob,
               void* scratch_bytes) {
  size_t num_bytes;
  Scratch scratch = carve_scratch(static_cast<uint8_t*>(scratch_bytes), vocab_size, &num_bytes);
  *logprob = 0.0f;
  if (!find_maxima(logits, vocab_size, scratch.small_max)) return -1;
  const float most = largest_of(scratch.small_max, ceil_div(vocab_size, kSmall));
  if (!is_finite(most)) return -1;

  const float temperature = sampling.temperature[index];
  const float scaled_most = most / temperature;
  const int32_t token = temperature > 0.0f && is_finite(scaled_most)
      ? draw_token(logits, vocab_size, temperature, scaled_most, sampling, index, scratch)
      : first_equal(logits, vocab_size, scratch.small_max, most);
  if (sampling.wants_logprob[index]) *logprob = log_probability(logits, vocab_size, most, token, scratch.block_sum);
  return token;
}

}  // namespace PACELINE_ISA
}  // namespace paceline
