// Rotary embedding, cache writes and attention: a token's result does not depend on how a prompt was cut into chunks, on
// how heads and segments were split over calls, on where its blocks lie or on what the free slots hold.
#include <algorithm>

#include "check.h"

namespace paceline::test {
namespace {

constexpr int kLayers = 2, kLayer = 1;    // the other layer must stay untouched

struct Shape {
  int num_heads, num_kv_heads, head_dim, block_size;
  bool is_bf16;
  int unrotated_dims = 0;    // at the end of a head
  float softcap = 0.0f;
  int window = 0;            // 0: a query sees all before it

  int rotary_dim() const { return head_dim - unrotated_dims; }
};

// A cache full of NaN bits, one row of `num_tokens` tokens whose blocks lie in shuffled order, and its inputs.
struct Row {
  Row(const Shape& s, int num_tokens, uint64_t seed) : shape(s), length(num_tokens) {
    Random random(seed);
    const int num_blocks = (num_tokens + s.block_size - 1) / s.block_size;
    const int64_t element_bytes = s.is_bf16 ? 2 : 4;
    kv = {nullptr, kLayers, s.num_kv_heads, s.head_dim, s.block_size, num_blocks + 3, s.is_bf16,
          int64_t{kLayers} * s.block_size * 2 * s.num_kv_heads * s.head_dim * element_bytes};
    num_bytes = kv.bytes_per_block * kv.num_blocks;
    memory.resize(static_cast<size_t>(num_bytes) + 64);
    kv.data = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
    std::memset(kv.data, 0xff, static_cast<size_t>(num_bytes));
    for (int block = 0; block < kv.num_blocks; ++block) blocks.push_back(block);
    for (size_t i = blocks.size(); i > 1; --i) std::swap(blocks[i - 1], blocks[static_cast<size_t>(random.below(i))]);
    Random values(12345);    // the same inputs whatever the blocks are
    qkv = values.bells(int64_t{num_tokens} * (s.num_heads + 2 * s.num_kv_heads) * s.head_dim);
    for (int position = 0; position < num_tokens; ++position) {
      positions.push_back(position);
      row_of_token.push_back(0);
      for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < s.rotary_dim() / 2; ++i) {
          const double angle = position * std::pow(10000.0, -2.0 * i / s.rotary_dim());
          rope.push_back(static_cast<float>(half == 0 ? std::cos(angle) : std::sin(angle)));
        }
      }
    }
    q.assign(static_cast<size_t>(int64_t{num_tokens} * s.num_heads * s.head_dim), 0.0f);
  }

  // The step that runs tokens [first, last), their inputs at the front of its arrays.
  Batch step(int first, int last) {
    row_starts[0] = 0;
    row_starts[1] = last - first;
    return {last - first, 1, 0, static_cast<int32_t>(blocks.size()), nullptr, positions.data() + first, row_starts,
            row_of_token.data(), blocks.data(), nullptr};
  }

  int64_t q_width() const { return int64_t{shape.num_heads} * shape.head_dim; }
  int64_t qkv_width() const { return q_width() + 2 * int64_t{shape.num_kv_heads} * shape.head_dim; }

  void write(const KernelTable& table, int first, int last) {
    table.rope_write_kv(qkv.data() + first * qkv_width(), rope.data(), shape.rotary_dim(), q.data() + first * q_width(), kv,
                        kLayer, shape.num_heads, step(first, last), 0, last - first);
  }

  Shape shape;
  int length;
  KVCache kv;
  int64_t num_bytes;
  std::vector<uint8_t> memory;
  std::vector<int32_t> blocks, positions, row_of_token;
  int32_t row_starts[2];
  std::vector<float> qkv, rope, q;
};

float scale_of(const Row& row) { return 1.0f / std::sqrt(static_cast<float>(row.shape.head_dim)); }

// Attention of tokens [first, last) as one step, cut into calls of `heads_per_call` KV heads and as many tokens as fit.
std::vector<float> attend_step(const KernelTable& table, Row& row, int first, int last, int heads_per_call) {
  const Batch batch = row.step(first, last);
  std::vector<float> out(static_cast<size_t>((last - first) * row.q_width()), -1.0f);
  const int group = row.shape.num_heads / row.shape.num_kv_heads;
  for (int head = 0; head < row.shape.num_kv_heads; head += heads_per_call) {
    const int last_head = std::min(row.shape.num_kv_heads, head + heads_per_call);
    const int most_tokens = kMaxQueries / (group * (last_head - head));
    for (int token = 0; token < last - first; token += most_tokens) {
      const AttendJob job = {0, token, std::min(last - first, token + most_tokens), head, last_head, 0, 1 << 20, -1, 0, 0, 0, row.shape.window};
      table.attend(row.q.data() + first * row.q_width(), row.kv, kLayer, row.shape.num_heads, scale_of(row),
                   row.shape.softcap, batch, job, out.data(), nullptr);
    }
  }
  return out;
}

// One token with every segment in a call of its own, merged afterwards.
std::vector<float> attend_by_segments(const KernelTable& table, Row& row, int token) {
  const Batch batch = row.step(token, token + 1);
  const int num_segments = token / kSegment + 1;
  const int64_t size = kPartialHead + row.shape.head_dim;
  std::vector<float> partials(static_cast<size_t>(row.shape.num_heads * num_segments * size) + 16);
  std::vector<float> out(static_cast<size_t>(row.q_width()), -1.0f);
  const float* q = row.q.data() + token * row.q_width();
  const int seen_from = row.shape.window > 0 ? std::max(token - row.shape.window + 1, 0) : 0;
  const int first_segment = seen_from / kSegment;
  for (int segment = num_segments - 1; segment >= first_segment; --segment) {    // any order will do
    for (int head = 0; head < row.shape.num_kv_heads; ++head) {
      const AttendJob job = {0, 0, 1, head, head + 1, segment, segment + 1, -1, 0, num_segments, 0, row.shape.window};
      table.attend(q, row.kv, kLayer, row.shape.num_heads, scale_of(row), row.shape.softcap, batch, job, nullptr,
                   partials.data());
    }
  }
  for (int head = 0; head < row.shape.num_heads; ++head) {
    table.merge_segments(partials.data() + first_segment * size, num_segments, num_segments - first_segment, row.shape.head_dim, head, head + 1, out.data());
  }
  return out;
}

// K or V as the cache holds it, by the layout that kernels.h states.
double cached(const Row& row, bool is_value, int head, int position, int d) {
  const Shape& s = row.shape;
  const int64_t element_bytes = s.is_bf16 ? 2 : 4, head_elements = 16 * int64_t{s.head_dim};
  const int64_t piece = 2 * s.num_kv_heads * head_elements;
  const int slot = position % s.block_size, lane = slot % 16;
  const int64_t block = row.blocks[static_cast<size_t>(position / s.block_size)];
  int64_t at = (int64_t{kLayer} * (s.block_size / 16) + slot / 16) * piece +
               (int64_t{is_value ? s.num_kv_heads : 0} + head) * head_elements;
  if (s.is_bf16) {
    at += is_value ? (lane / 2 * s.head_dim + d) * 2 + lane % 2 : (d / 2 * 16 + lane) * 2 + d % 2;
  } else {
    at += is_value ? lane * s.head_dim + d : d * 16 + lane;
  }
  const uint8_t* from = row.kv.data + block * row.kv.bytes_per_block + at * element_bytes;
  if (s.is_bf16) {
    uint16_t bits;
    std::memcpy(&bits, from, 2);
    return from_bf16(bits);
  }
  float value;
  std::memcpy(&value, from, 4);
  return value;
}

std::vector<double> reference(const Row& row, int token, int head) {
  const Shape& s = row.shape;
  const int kv_head = head / (s.num_heads / s.num_kv_heads);
  std::vector<double> weights(static_cast<size_t>(token + 1)), out(static_cast<size_t>(s.head_dim), 0.0);
  double most = -1e300, total = 0.0;
  for (int key = 0; key <= token; ++key) {
    double score = 0.0;
    for (int d = 0; d < s.head_dim; ++d) {
      const float value = row.q[static_cast<size_t>(token * row.q_width() + head * s.head_dim + d)];
      score += static_cast<double>(s.is_bf16 ? from_bf16(to_bf16(value)) : value) * cached(row, false, kv_head, key, d);
    }
    score *= static_cast<double>(scale_of(row));
    if (s.softcap > 0.0f) score = s.softcap * std::tanh(score / s.softcap);
    weights[static_cast<size_t>(key)] = score;
    most = std::max(most, weights[static_cast<size_t>(key)]);
  }
  const int seen_from = s.window > 0 ? std::max(token - s.window + 1, 0) : 0;
  std::fill_n(weights.begin(), seen_from, -1e300);
  for (double& weight : weights) total += weight = std::exp(weight - most);
  for (int key = 0; key <= token; ++key) {
    for (int d = 0; d < s.head_dim; ++d) {
      out[static_cast<size_t>(d)] += weights[static_cast<size_t>(key)] / total * cached(row, true, kv_head, key, d);
    }
  }
  return out;
}

// Keys and values written in one call, token by token, and for a row whose blocks lie elsewhere.
void check_writes(Check& check, const KernelTable& table, Row& whole, Row& single, Row& moved) {
  whole.write(table, 0, whole.length);
  for (int token = 0; token < single.length; ++token) single.write(table, token, token + 1);
  moved.write(table, 0, moved.length);
  check.same_bits(whole.q.data(), single.q.data(), static_cast<int64_t>(whole.q.size()), "rotated queries", 0);
  check.expect(std::memcmp(whole.kv.data, single.kv.data, static_cast<size_t>(whole.num_bytes)) == 0,
               "the cache differs between one call and a call for each token");
  const int64_t other_layer = whole.kv.bytes_per_block / kLayers;    // layer 0 comes first in a block
  for (int block = 0; block < whole.kv.num_blocks; ++block) {
    const uint8_t* from = whole.kv.data + block * whole.kv.bytes_per_block;
    check.expect(std::all_of(from, from + other_layer, [](uint8_t byte) { return byte == 0xff; }),
                 "block %d: another layer was written", block);
  }
  for (int position : {0, whole.length / 2, whole.length - 1}) {
    for (int d = 0; d < whole.shape.head_dim; ++d) {
      const int half = whole.shape.rotary_dim() / 2;
      const float* k = whole.qkv.data() + position * whole.qkv_width() + whole.q_width();
      double right = k[d];
      if (d < 2 * half) {
        const float* angles = whole.rope.data() + position * whole.shape.rotary_dim();
        const double cosine = angles[d % half], sine = angles[half + d % half];
        right = d < half ? k[d] * cosine - k[d + half] * sine : k[d] * cosine + k[d - half] * sine;
      }
      const double got = cached(whole, false, 0, position, d);
      check.expect(std::fabs(got - right) <= (whole.shape.is_bf16 ? 0.005 * std::fabs(right) + 1e-6 : 2e-6),
                   "key %d dimension %d is %.9g, should be %.9g", position, d, got, right);
    }
  }
}

void check_token(Check& exact, Check& error, const KernelTable& table, Row& whole, Row& moved,
                 const std::vector<float>& prefill, int token) {
  const float* right = prefill.data() + token * whole.q_width();
  const std::vector<float> alone = attend_step(table, whole, token, token + 1, whole.shape.num_kv_heads);
  const std::vector<float> by_head = attend_step(table, whole, token, token + 1, 1);
  const std::vector<float> by_segment = attend_by_segments(table, whole, token);
  const std::vector<float> elsewhere = attend_step(table, moved, token, token + 1, 1);
  exact.same_bits(right, alone.data(), whole.q_width(), "decode of token", token);
  exact.same_bits(right, by_head.data(), whole.q_width(), "head by head, token", token);
  exact.same_bits(right, by_segment.data(), whole.q_width(), "segment by segment, token", token);
  exact.same_bits(right, elsewhere.data(), whole.q_width(), "other blocks, token", token);
  const int first = std::max(0, token - 20);
  const std::vector<float> chunk = attend_step(table, whole, first, token + 1, 2);
  exact.same_bits(right, chunk.data() + (token - first) * whole.q_width(), whole.q_width(), "chunk that ends at", token);
  for (int head = 0; head < whole.shape.num_heads; ++head) {
    const std::vector<double> values = reference(whole, token, head);
    for (int d = 0; d < whole.shape.head_dim; ++d) {
      const double got = right[head * whole.shape.head_dim + d], wanted = values[static_cast<size_t>(d)];
      // bf16: probabilities are rounded to 8 bits, values of about 1 are averaged.
      error.expect(std::fabs(got - wanted) <= (whole.shape.is_bf16 ? 1e-2 : 1e-5), "token %d head %d: %.9g, should be %.9g",
                   token, head, got, wanted);
    }
  }
}

// A token whose value is an infinity or a NaN changes nothing for the tokens ahead of it in the same call, and shows
// itself after it as it does in a call of the token's own.
void test_wild_values(const KernelTable& table, const Shape& shape, int length) {
  Check check(std::string(table.name) + " attention " + (shape.is_bf16 ? "bf16" : "f32") + " x" +
              std::to_string(shape.head_dim) + ", values that are not finite");
  Row tame(shape, length, 1);
  tame.write(table, 0, length);
  const std::vector<float> right = attend_step(table, tame, 0, length, shape.num_kv_heads);
  for (int wild : {1, 2, 37, 63, 64, length - 1}) {
    Row row(shape, length, 1);
    const size_t value = static_cast<size_t>((wild + 1) * row.qkv_width() - 3);    // of the last head
    row.qkv[value] = wild % 2 == 0 ? HUGE_VALF : -NAN;
    row.write(table, 0, length);
    const std::vector<float> got = attend_step(table, row, 0, length, shape.num_kv_heads);
    check.same_bits(got.data(), right.data(), wild * row.q_width(), "tokens ahead of", wild);
    const int unseen_from = shape.window > 0 ? std::min(wild + shape.window, length) : length;
    check.same_bits(got.data() + unseen_from * row.q_width(), right.data() + unseen_from * row.q_width(),
                    (length - unseen_from) * row.q_width(), "tokens whose window has left behind", wild);
    for (int token = wild; token < length; ++token) {
      const std::vector<float> alone = attend_step(table, row, token, token + 1, 1);
      const float* together = got.data() + token * row.q_width();
      for (int64_t i = 0; i < row.q_width(); ++i) {
        const float a = alone[static_cast<size_t>(i)], b = together[i];
        check.expect(std::memcmp(&a, &b, 4) == 0 || (std::isnan(a) && std::isnan(b)), "token %d element %d: %.9g, alone %.9g",
                     token, static_cast<int>(i), static_cast<double>(b), static_cast<double>(a));
      }
      check.expect(token >= unseen_from || !std::isfinite(together[row.q_width() - 3]), "token %d does not show the value of token %d", token, wild);
    }
  }
}

void test_shape(const KernelTable& table, const Shape& shape, int length) {
  const std::string label = std::string(table.name) + " attention " + (shape.is_bf16 ? "bf16 " : "f32 ") +
                            std::to_string(shape.num_heads) + "/" + std::to_string(shape.num_kv_heads) + "x" +
                            std::to_string(shape.head_dim) + " blocks of " + std::to_string(shape.block_size) + ", " +
                            std::to_string(length) + " tokens" + (shape.unrotated_dims > 0 ? ", partly rotated" : "") +
                            (shape.softcap > 0.0f ? ", soft-capped" : "") +
                            (shape.window > 0 ? ", window of " + std::to_string(shape.window) : "");
  Row whole(shape, length, 1), single(shape, length, 1), moved(shape, length, 2);
  Check writes(label + ": cache"), exact(label + ": bits"), error(label + ": error");
  check_writes(writes, table, whole, single, moved);
  const std::vector<float> prefill = attend_step(table, whole, 0, length, shape.num_kv_heads);
  for (int token : {0, 1, 2, 15, 16, 17, 31, 63, 64, 65, 100, 511, 512, 513, 575, 576, 1023, 1024, 1030, length - 2,
                    length - 1}) {
    if (token >= 0 && token < length) check_token(exact, error, table, whole, moved, prefill, token);
  }
}

}  // namespace

void test_attention(const KernelTable& table) {
  for (bool is_bf16 : {false, true}) {
    test_shape(table, {3, 1, 64, 16, is_bf16}, 3 * kSegment + 5);
    test_shape(table, {4, 2, 32, 32, is_bf16}, kSegment + 5);
    test_shape(table, {9, 3, 64, 64, is_bf16}, 130);
    test_shape(table, {2, 2, 128, 16, is_bf16}, 70);
    test_shape(table, {3, 1, 64, 16, is_bf16, 48}, 70);
    test_shape(table, {2, 1, 32, 16, is_bf16, 32}, 70);
    test_shape(table, {3, 1, 64, 16, is_bf16, 0, 2.0f}, kSegment + 5);
    for (int window : {1, 20, 64, 130, 700}) test_shape(table, {3, 1, 64, 16, is_bf16, 0, 0.0f, window}, 2 * kSegment + 5);
    test_shape(table, {4, 2, 32, 32, is_bf16, 0, 0.0f, 100}, kSegment + 105);
    test_wild_values(table, {3, 1, 64, 16, is_bf16}, 71);
    test_wild_values(table, {4, 2, 32, 32, is_bf16}, 94);
    test_wild_values(table, {3, 1, 64, 16, is_bf16, 0, 0.0f, 25}, 94);
    test_wild_values(table, {3, 1, 64, 16, is_bf16, 0, 0.0f, 3}, 94);
    for (int length = 1; length <= 19; length += 2) test_shape(table, {3, 1, 64, 16, is_bf16}, length);
  }
}

}  // namespace paceline::test
