// The next token of one row of logits. The rules stand in paceline/ops/numpy_sampler.py, which states them in numpy; this
// file must agree with it. In short: masks, biases and penalties on a copy of the row; then, unless it is greedy,
// scaled = logit / temperature, min_p, top_k, top_p, typical_p; and of what is kept, in id order, the first whose cumulative
// weight exceeds u * total. Log-probabilities are those of the row as it came.
//
// Nothing is sorted but the few best tokens. A threshold below the maximum picks candidates, and radix selection on the bits
// of a float finds the value at which a limit cuts, exactly, in time linear in the candidates. Weights are e^(scaled - max)
// in f32, their sums are in double and over fixed runs in id order.
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
  float* changed;        // [vocab] logits after masks, biases and penalties
  int32_t* num_seen;     // [vocab] how often the output has a token; set only where the history has it
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
  s.rank_a = carve<int32_t>(at, vocab_size + 1);
  s.rank_b = carve<int32_t>(at, vocab_size + 1);
  s.changed = carve<float>(at, vocab_size);
  s.num_seen = carve<int32_t>(at, vocab_size);
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

// e^a for a <= 0 within 2 units in the last place; below the smallest normal exactly 0.
PL_INLINE f32x16 exp_negative(f32x16 a) {
  const f32x16 lowest = set1(-87.33654f);
  const f32x16 inside = max(a, lowest);
  const i32x16 n = to_i32(mul(inside, set1(1.44269504f)));
  const f32x16 nf = to_f32(n);
  f32x16 r = fma(nf, set1(-0.693359375f), inside);    // ln 2 in two parts, the first exact times n
  r = fma(nf, set1(2.12194440e-4f), r);
  f32x16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  return select(less(a, lowest), zero(), mul(p, as_f32(shift_left<23>(add_i32(n, set1_i32(127))))));
}

// Sixteen sums, every sixteenth value each, added up in order. Reads zeros up to the next multiple of 16.
double sum_of(const float* weight, int64_t n) {
  double lanes[kLanes] = {0};
  for (int64_t i = 0; i < n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += static_cast<double>(weight[i + lane]);
  }
  double sum = 0.0;
  for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
  return sum;
}

// weight[i] = e^(x[i] / temperature - most) over n <= 1024 values; writes up to 15 further weights of 0. Returns the sum.
double weigh_block(const float* x, int64_t n, float temperature, float most, float* weight) {
  const bool divides = temperature != 1.0f;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const f32x16 scaled = divides ? div(load(x + i), set1(temperature)) : load(x + i);
    store(weight + i, exp_negative(sub(scaled, set1(most))));
  }
  if (i < n) {
    const int left = static_cast<int>(n - i);
    const f32x16 scaled = div(load_first(x + i, left), set1(temperature));
    store(weight + i, select(first_lanes(left), exp_negative(sub(scaled, set1(most))), zero()));
  }
  return sum_of(weight, n);
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

float value_of(uint32_t key) {
  const uint32_t raw = key & 0x80000000u ? key & 0x7fffffffu : ~key;
  float value;
  memcpy(&value, &raw, 4);
  return value;
}

// Where a kept set ends in the order (scaled descending, id ascending): everything above `value`, and the first
// `num_ties` that equal it.
struct Cut {
  uint32_t key;
  int64_t num_ties;
};

// The shortest run whose count (weight null) or weight reaches `need`; at least one, at most all. Works down the bits in
// which the candidates' keys differ, 11 at a time: adds up what each of 2048 ranges of keys weighs, finds the range in
// which `need` is reached and goes on with the candidates in it.
Cut find_cut(const Candidates& c, const float* weight, double need, const Scratch& scratch) {
  constexpr int kBinBits = 11;
  uint32_t top = 0;
  uint32_t bottom = ~0u;
  for (int64_t i = 0; i < c.count; ++i) {
    const uint32_t key = key_of(c.scaled[i]);
    top = key > top ? key : top;
    bottom = key < bottom ? key : bottom;
  }
  int num_bits = top == bottom ? 1 : 32 - __builtin_clz(top - bottom);    // of a key's distance from the top, still open
  const int32_t* items = nullptr;    // null: all
  int64_t count = c.count;
  double above = 0.0;
  uint32_t distance = 0;
  for (int level = 0; num_bits > 0; ++level) {
    const int shift = num_bits > kBinBits ? num_bits - kBinBits : 0;
    const uint32_t mask = (1u << (num_bits - shift)) - 1;
    double bins[1 << kBinBits] = {0};
    for (int64_t i = 0; i < count; ++i) {
      const int32_t at = items == nullptr ? static_cast<int32_t>(i) : items[i];
      bins[(top - key_of(c.scaled[at])) >> shift & mask] += weight == nullptr ? 1.0 : static_cast<double>(weight[at]);
    }
    uint32_t chosen = 0;    // the last range that weighs anything, if rounding leaves the sum of all short of `need`
    double above_chosen = above;
    for (uint32_t bin = 0; bin <= mask; ++bin) {
      if (bins[bin] == 0.0) continue;
      chosen = bin;
      above_chosen = above;
      above += bins[bin];
      if (above >= need) break;
    }
    above = above_chosen;
    distance |= chosen << shift;
    int32_t* kept = level % 2 == 0 ? scratch.rank_a : scratch.rank_b;
    int64_t num_kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t at = items == nullptr ? static_cast<int32_t>(i) : items[i];
      kept[num_kept] = at;
      num_kept += ((top - key_of(c.scaled[at])) >> shift & mask) == chosen;
    }
    items = kept;
    count = num_kept;
    num_bits = shift;
  }
  int64_t num_ties = 1;
  const double each = weight == nullptr ? 1.0 : static_cast<double>(weight[items[0]]);
  for (above += each; num_ties < count && above < need; above += each) ++num_ties;
  return {top - distance, num_ties};
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
  store(c.weight + count, zero());    // for sum_of
}

// All ids with scaled >= threshold, with their weights.
void gather(const float* logits, int64_t vocab_size, const float* small_max, float temperature, float most,
            float threshold, Candidates& c) {
  c.count = 0;
  for (int64_t begin = 0; begin < vocab_size; begin += kSmall) {
    if (small_max[begin / kSmall] / temperature < threshold) continue;
    const int64_t end = begin + kSmall < vocab_size ? begin + kSmall : vocab_size;
    for (int64_t i = begin; i < end; i += kLanes) {
      const int left = static_cast<int>(end - i < kLanes ? end - i : kLanes);
      const f32x16 x = add(div(load_first(logits + i, left), set1(temperature)), zero());    // no -0 may reach key_of
      uint32_t hits = bits(mask_and(less_equal(set1(threshold), x), first_lanes(left)));
      if (hits == 0) continue;
      float scaled[kLanes];
      store(scaled, x);
      for (; hits != 0; hits &= hits - 1) {
        const int lane = __builtin_ctz(hits);
        c.scaled[c.count] = scaled[lane];
        c.id[c.count++] = static_cast<int32_t>(i + lane);
      }
    }
  }
  for (int64_t i = 0; i < c.count; i += kLanes) {
    const int left = static_cast<int>(c.count - i < kLanes ? c.count - i : kLanes);
    const f32x16 e = exp_negative(sub(load_first(c.scaled + i, left), set1(most)));
    store(c.weight + i, select(first_lanes(left), e, zero()));
  }
}

// What bounds a draw, beside the row itself. `most` is the largest logit / temperature.
struct Limits {
  float temperature, most;
  int64_t top_k;    // 0: the whole vocabulary
  double top_p;
  float min_p;
  double typical_p;
  bool are_none(int64_t vocab_size) const {
    return (top_k <= 0 || top_k >= vocab_size) && top_p >= 1.0 && min_p <= 0.0f && typical_p >= 1.0;
  }
};

// A value that at least top_k logits reach and few more: the top_k-th largest of the maxima of 64.
float threshold_of(int64_t vocab_size, float temperature, int64_t top_k, const Scratch& scratch) {
  const int64_t num_small = ceil_div(vocab_size, kSmall);
  if (top_k > num_small) return -__builtin_inff();
  const Candidates maxima = {scratch.all.scaled, nullptr, nullptr, num_small};
  for (int64_t i = 0; i < num_small; ++i) maxima.scaled[i] = scratch.small_max[i] / temperature + 0.0f;
  return value_of(find_cut(maxima, nullptr, static_cast<double>(top_k), scratch).key);
}

// Drops weights below the least; the order by id stays.
void keep_weights(Candidates& c, float least) {
  int64_t count = 0;
  for (int64_t i = 0; i < c.count; ++i) {
    if (c.weight[i] < least) continue;
    c.scaled[count] = c.scaled[i];
    c.weight[count] = c.weight[i];
    c.id[count] = c.id[i];
    ++count;
  }
  c.count = count;
  store(c.weight + count, zero());    // for sum_of
}

// The shortest run in the order (distance of a token's surprise from their mean, id) that holds a share of typical_p. A
// surprise is -log p; the log of the total, in all of them, cancels out. The distances take the place of c.scaled.
void keep_typical(Candidates& c, float most, double typical_p, const Scratch& scratch) {
  keep_weights(c, 1.17549435e-38f);
  double total = 0.0;
  double surprise = 0.0;
  for (int64_t i = 0; i < c.count; ++i) {
    total += static_cast<double>(c.weight[i]);
    surprise += static_cast<double>(c.weight[i]) * static_cast<double>(most - c.scaled[i]);
  }
  const double mean = surprise / total;
  for (int64_t i = 0; i < c.count; ++i) {
    const double distance = static_cast<double>(most - c.scaled[i]) - mean;
    c.scaled[i] = -static_cast<float>(distance < 0.0 ? -distance : distance) + 0.0f;    // no -0 may reach key_of
  }
  keep(c, find_cut(c, c.weight, typical_p * sum_of(c.weight, c.count), scratch));
}

// The candidates that the limits leave.
void gather_kept(const float* logits, int64_t vocab_size, const Limits& limits, Scratch& scratch) {
  constexpr float kDistances[6] = {2.0f, 4.0f, 6.0f, 9.0f, 13.0f, __builtin_inff()};    // of a threshold from the top
  Candidates& c = scratch.all;
  const float most = limits.most;
  const bool has_top_k = limits.top_k > 0 && limits.top_k < vocab_size;
  const auto gather_from = [&](float threshold) {
    gather(logits, vocab_size, scratch.small_max, limits.temperature, most, threshold, c);
  };
  double need = 0.0;
  if (has_top_k || limits.min_p > 0.0f) {
    float threshold = has_top_k ? threshold_of(vocab_size, limits.temperature, limits.top_k, scratch) : -__builtin_inff();
    if (limits.min_p > 0.0f) {    // somewhat below: the weight decides
      const float least =
          most + static_cast<float>(log_of(static_cast<double>(limits.min_p))) - 0.01f - 1e-6f * (most < 0.0f ? -most : most);
      threshold = least > threshold ? least : threshold;
    }
    gather_from(threshold);
    if (limits.min_p > 0.0f) keep_weights(c, limits.min_p);
    if (has_top_k && limits.top_k < c.count) keep(c, find_cut(c, nullptr, static_cast<double>(limits.top_k), scratch));
    need = limits.top_p * sum_of(c.weight, c.count);
  } else if (limits.top_p < 1.0) {
    need = limits.top_p * weigh_all(logits, vocab_size, limits.temperature, most, scratch.block_sum);
    for (const float below : kDistances) {
      gather_from(most - below);
      if (sum_of(c.weight, c.count) >= need) break;
    }
  } else {
    gather_from(most - 100.0f);    // whatever weighs anything
  }
  if (limits.top_p < 1.0) keep(c, find_cut(c, c.weight, need, scratch));
  if (limits.typical_p < 1.0) keep_typical(c, most, limits.typical_p, scratch);
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

int32_t draw_token(const float* logits, int64_t vocab_size, const Limits& limits, double u, Scratch& scratch) {
  if (limits.are_none(vocab_size)) {
    return draw_from_all(logits, vocab_size, limits.temperature, limits.most, u, scratch);
  }
  gather_kept(logits, vocab_size, limits, scratch);
  const Candidates& c = scratch.all;
  return c.id[walk(c.weight, c.count, 0.0, u * sum_of(c.weight, c.count))];
}

// The token of a row whose maximum is finite; small_max is the row's. entry: its place in the extras, or -1.
int32_t choose(const float* logits, int64_t vocab_size, float most, const Sampling& sampling, int64_t index, int64_t entry,
               Scratch& scratch) {
  const float temperature = sampling.temperature[index];
  const float scaled_most = most / temperature;
  if (!(temperature > 0.0f) || !is_finite(scaled_most)) return first_equal(logits, vocab_size, scratch.small_max, most);
  Limits limits = {temperature, scaled_most, sampling.top_k[index], static_cast<double>(sampling.top_p[index]), 0.0f, 1.0};
  if (entry >= 0) {
    limits.min_p = sampling.extras->min_p[entry];
    limits.typical_p = static_cast<double>(sampling.extras->typical_p[entry]);
  }
  return draw_token(logits, vocab_size, limits, draw(sampling, index), scratch);
}

// -------------------------------------------------------------------------------------------------------------- extras

// Penalties of the tokens that the history has, each once.
void penalise(float* logits, const SamplingExtras& x, int64_t entry, int32_t* num_seen) {
  const int32_t* const tokens = x.history.values + x.history.begin(entry);
  const int64_t count = x.history.end(entry) - x.history.begin(entry);
  const float repetition = x.repetition_penalty[entry];
  for (int64_t i = 0; i < count; ++i) num_seen[tokens[i]] = 0;
  for (int64_t i = x.num_prompt[entry]; i < count; ++i) ++num_seen[tokens[i]];
  for (int64_t i = 0; i < count; ++i) {
    int32_t& seen = num_seen[tokens[i]];
    if (seen < 0) continue;    // had its turn
    float& logit = logits[tokens[i]];
    logit = logit > 0.0f ? logit / repetition : logit * repetition;
    logit -= x.frequency_penalty[entry] * static_cast<float>(seen);
    if (seen > 0) logit -= x.presence_penalty[entry];
    seen = -1;
  }
}

// Writes scratch.changed and its maxima; returns the largest.
float change_logits(const float* logits, int64_t vocab_size, const SamplingExtras& x, int64_t entry, bool with_bans,
                    Scratch& scratch) {
  float* const out = scratch.changed;
  if (x.allowed.is_empty(entry)) {
    memcpy(out, logits, static_cast<size_t>(vocab_size) * sizeof(float));
  } else {
    for (int64_t i = 0; i < vocab_size; ++i) out[i] = -__builtin_inff();
    for (int32_t i = x.allowed.begin(entry); i < x.allowed.end(entry); ++i) {
      out[x.allowed.values[i]] = logits[x.allowed.values[i]];
    }
  }
  if (with_bans) {
    for (int32_t i = x.banned.begin(entry); i < x.banned.end(entry); ++i) out[x.banned.values[i]] = -__builtin_inff();
  }
  for (int32_t i = x.biased.begin(entry); i < x.biased.end(entry); ++i) out[x.biased.values[i]] += x.bias[i];
  penalise(out, x, entry, scratch.num_seen);
  if (!find_maxima(out, vocab_size, scratch.small_max)) return __builtin_inff();
  return largest_of(scratch.small_max, ceil_div(vocab_size, kSmall));
}

bool changes_anything(const SamplingExtras& x, int64_t entry) {
  return !x.allowed.is_empty(entry) || !x.banned.is_empty(entry) || !x.biased.is_empty(entry) || !x.history.is_empty(entry);
}

// The num_top best tokens of the row, best first; small_max is the row's.
void write_best(const float* logits, int64_t vocab_size, float most, const SamplingExtras& x, int64_t entry,
                Scratch& scratch) {
  const int64_t num_top = x.num_top[entry] < vocab_size ? x.num_top[entry] : vocab_size;
  if (num_top <= 0) return;
  const double log_total = log_of(weigh_all(logits, vocab_size, 1.0f, most, scratch.block_sum));
  Candidates& c = scratch.all;
  gather(logits, vocab_size, scratch.small_max, 1.0f, most, threshold_of(vocab_size, 1.0f, num_top, scratch), c);
  keep(c, find_cut(c, nullptr, static_cast<double>(num_top), scratch));
  for (int64_t i = 1; i < c.count; ++i) {    // by insertion: few, and equals stay in the order of their ids
    const float value = c.scaled[i];
    const int32_t id = c.id[i];
    int64_t at = i;
    for (; at > 0 && c.scaled[at - 1] < value; --at) {
      c.scaled[at] = c.scaled[at - 1];
      c.id[at] = c.id[at - 1];
    }
    c.scaled[at] = value;
    c.id[at] = id;
  }
  for (int64_t i = 0; i < c.count; ++i) {
    x.top_ids[entry * x.top_width + i] = c.id[i];
    x.top_logprobs[entry * x.top_width + i] =
        static_cast<float>(static_cast<double>(c.scaled[i]) - static_cast<double>(most) - log_total);
  }
}

int32_t sample_with_extras(const float* logits, int64_t vocab_size, float most, const Sampling& sampling, int64_t index,
                           int64_t entry, Scratch& scratch) {
  const SamplingExtras& x = *sampling.extras;
  write_best(logits, vocab_size, most, x, entry, scratch);
  if (x.target[entry] >= 0) return x.target[entry];
  if (!changes_anything(x, entry)) return choose(logits, vocab_size, most, sampling, index, entry, scratch);
  float left = change_logits(logits, vocab_size, x, entry, true, scratch);
  if (!is_finite(left)) left = change_logits(logits, vocab_size, x, entry, false, scratch);
  if (is_finite(left)) return choose(scratch.changed, vocab_size, left, sampling, index, entry, scratch);
  find_maxima(logits, vocab_size, scratch.small_max);
  return choose(logits, vocab_size, most, sampling, index, entry, scratch);
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

  const int64_t entry = sampling.entry_of == nullptr ? -1 : sampling.entry_of[index];
  const int32_t token = entry < 0 ? choose(logits, vocab_size, most, sampling, index, -1, scratch)
                                  : sample_with_extras(logits, vocab_size, most, sampling, index, entry, scratch);
  if (sampling.wants_logprob[index]) *logprob = log_probability(logits, vocab_size, most, token, scratch.block_sum);
  return token;
}

}  // namespace PACELINE_ISA
}  // namespace paceline
