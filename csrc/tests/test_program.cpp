// A whole step without Python: a two-layer decoder, recorded by hand, run on the thread pool; with a plain MLP or with experts.
// A prompt gives the same logits in one step, in pieces, beside another row, in other blocks and on any number of threads.
#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "../runner.h"
#include "check.h"

namespace paceline::test {
namespace {

constexpr int kLayers = 2, kHeads = 4, kKVHeads = 2, kHeadDim = 32, kHidden = 64, kInner = 96, kVocab = 50, kBlockSize = 16;
constexpr int kPositions = 640, kBlocks = 2 * kPositions / kBlockSize;
constexpr int kExperts = 5, kTopK = 2;
constexpr int kQWidth = kHeads * kHeadDim, kQKVWidth = (kHeads + 2 * kKVHeads) * kHeadDim;

enum BufferId {
  x, normed, qkv, q, attended, residual, gate_up, activated, last, logits,
  router, routes, routed, routed_gate_up, routed_activated, routed_out
};

class Recorder {
 public:
  // has_witness: somebody else reads what gate and up's activation writes, so that it has to be written.
  explicit Recorder(Form form, bool has_experts = false, bool has_witness = false)
      : form_(form), has_experts_(has_experts), has_witness_(has_witness), random_(99) {
    for (int64_t width : {kHidden, kHidden, kQKVWidth, kQWidth, kQWidth, kHidden, 2 * kInner, kInner}) buffer(Rows::tokens, width);
    buffer(Rows::wanted, kHidden);
    buffer(Rows::wanted, kVocab);
    buffer(Rows::tokens, kExperts);
    buffer(Rows::tokens, 2 * kTopK);
    for (int64_t width : {kHidden, 2 * kInner, kInner, kHidden}) buffer(Rows::routed, width);
    spec.num_heads = kHeads;
    spec.num_kv_heads = kKVHeads;
    spec.head_dim = kHeadDim;
    spec.vocab_size = kVocab;
    record();
  }

  ProgramSpec spec;

 private:
  void buffer(Rows rows, int64_t width) {
    spec.buffers.push_back({static_cast<int64_t>(spec.buffers.size()), rows, width});
  }

  std::string matrix(const std::string& name, int64_t num_outputs, int64_t num_inputs) {
    const std::vector<float> values = random_.bells(num_outputs * num_inputs, 0.2f);
    WeightSpec weight{};
    weight.is_packed = true;
    weight.packed = pack(form_, num_inputs, {{"F32", reinterpret_cast<const uint8_t*>(values.data()), num_outputs,
                                              num_inputs * 4, num_inputs * 4, nullptr}});
    spec.weights[name] = weight;
    return name;
  }

  std::string array(const std::string& name, int64_t rows, std::vector<float> values) {
    WeightSpec weight{};
    weight.rows = rows;
    weight.columns = static_cast<int64_t>(values.size()) / rows;
    weight.values = std::move(values);
    spec.weights[name] = weight;
    return name;
  }

  void node(const char* verb, std::vector<int64_t> inputs, int64_t output, std::vector<std::string> weights = {},
            std::map<std::string, double> attrs = {}) {
    spec.nodes.push_back({verb, std::move(inputs), output, std::move(weights), std::move(attrs)});
  }

  void norm(const std::string& name, int64_t from, int64_t to) {
    node("rms_norm", {from}, to, {array(name, 1, random_.bells(kHidden))}, {{"eps", 1e-5}});
  }

  void record() {
    std::vector<float> rope;
    for (int position = 0; position < kPositions; ++position) {
      for (int i = 0; i < kHeadDim; ++i) {
        const double angle = position * std::pow(10000.0, -2.0 * (i % (kHeadDim / 2)) / kHeadDim);
        rope.push_back(static_cast<float>(i < kHeadDim / 2 ? std::cos(angle) : std::sin(angle)));
      }
    }
    array("rope", kPositions, rope);
    node("embed", {}, x, {matrix("embed", kVocab, kHidden)});
    for (int layer = 0; layer < kLayers; ++layer) {
      const std::string at = "layers." + std::to_string(layer) + ".";
      norm(at + "attn_norm", x, normed);
      node("linear", {normed}, qkv, {matrix(at + "qkv", kQKVWidth, kHidden)});
      node("rope_write_kv", {qkv}, q, {"rope"}, {{"layer", layer}});
      node("paged_attention", {q}, attended, {}, {{"layer", layer}, {"scale", 0.2}});
      node("linear", {attended}, residual, {matrix(at + "o", kHidden, kQWidth)});
      node("add", {x, residual}, x);
      norm(at + "mlp_norm", x, normed);
      if (has_experts_) record_experts(at); else record_mlp(at);
      node("add", {x, residual}, x);
    }
    node("select_wanted", {x}, last);
    node("linear", {last}, logits, {"embed"});
    node("sample", {logits}, -1);
  }

  void record_mlp(const std::string& at) {
    node("linear", {normed}, gate_up, {matrix(at + "gate_up", 2 * kInner, kHidden)});
    node("silu_mul", {gate_up}, activated);
    node("linear", {activated}, residual, {matrix(at + "down", kHidden, kInner)});
    if (has_witness_) node("scale", {activated}, activated, {}, {{"factor", 0.5}});
  }

  void record_experts(const std::string& at) {
    std::vector<std::string> first, second;
    for (int expert = 0; expert < kExperts; ++expert) {
      first.push_back(matrix(at + "gate_up" + std::to_string(expert), 2 * kInner, kHidden));
      second.push_back(matrix(at + "down" + std::to_string(expert), kHidden, kInner));
    }
    node("linear", {normed}, router, {matrix(at + "router", kExperts, kHidden)});
    node("route", {router}, routes, {}, {{"top_k", kTopK}, {"renormalise", 1}});
    node("gather_routed", {normed, routes}, routed);
    node("expert_linear", {routed, routes}, routed_gate_up, first);
    node("silu_mul", {routed_gate_up}, routed_activated);
    node("expert_linear", {routed_activated, routes}, routed_out, second);
    node("combine_routed", {routed_out, routes}, residual);
  }

  Form form_;
  bool has_experts_, has_witness_;
  Random random_;
};

std::vector<int32_t> tokens_of(int count, uint64_t seed) {
  Random random(seed);
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(static_cast<int32_t>(random.below(kVocab)));
  return tokens;
}

// Tokens [first, last) of a row whose blocks are first_block, first_block + stride, ...
struct RowPart {
  const std::vector<int32_t>& tokens;
  int first, last, first_block, stride;
};

// Runs the parts as one step; the logits after the last token of the first part.
std::vector<float> run_step(Runner& runner, const std::vector<RowPart>& parts) {
  std::vector<int32_t> token_ids, positions, row_starts{0}, tables, wanted;
  const int64_t max_blocks = kPositions / kBlockSize;
  for (const RowPart& part : parts) {
    for (int i = part.first; i < part.last; ++i) {
      token_ids.push_back(part.tokens[static_cast<size_t>(i)]);
      positions.push_back(i);
    }
    row_starts.push_back(static_cast<int32_t>(token_ids.size()));
    wanted.push_back(static_cast<int32_t>(token_ids.size()) - 1);
    const int num_used = (part.last + kBlockSize - 1) / kBlockSize;
    for (int64_t i = 0; i < max_blocks; ++i) {
      tables.push_back(i < num_used ? static_cast<int32_t>(part.first_block + i * part.stride) : 0);
    }
  }
  const size_t rows = parts.size();
  const std::vector<float> temperature(rows, 0.0f), top_p(rows, 1.0f);
  const std::vector<int32_t> top_k(rows, 0);
  const std::vector<uint64_t> seed(rows, 0), position(rows, 0);
  const std::vector<uint32_t> index(rows, 0);
  const std::vector<uint8_t> wants_logprob(rows, 1);
  const StepInput in = {static_cast<int64_t>(token_ids.size()), static_cast<int64_t>(rows), static_cast<int64_t>(rows), 0, 1,
                        max_blocks, token_ids.data(), positions.data(), row_starts.data(), tables.data(), wanted.data(),
                        nullptr,
                        {temperature.data(), top_k.data(), top_p.data(), seed.data(), index.data(), index.data(),
                         position.data(), wants_logprob.data()}};
  std::vector<int32_t> drawn(rows);
  std::vector<float> logprobs(rows), out(rows * kVocab);
  runner.step(in, drawn.data(), logprobs.data(), out.data());
  const auto best = std::max_element(out.begin(), out.begin() + kVocab);
  if (drawn[0] != best - out.begin()) return {};    // greedy must agree with the logits it was drawn from
  out.resize(kVocab);
  return out;
}

void poison(Runner& runner) {
  std::vector<int32_t> all(kBlocks);
  for (int i = 0; i < kBlocks; ++i) all[static_cast<size_t>(i)] = i;
  runner.poison(all.data(), kBlocks);
}

void test_form(const KernelTable& table, Form form, bool is_bf16, bool has_experts = false) {
  Check check(std::string(table.name) + " program, " + form_name(form) + " weights, " + (is_bf16 ? "bf16" : "f32") + " cache" +
              (has_experts ? ", experts" : ""));
  const std::vector<int32_t> prompt = tokens_of(kSegment + 40, 1), other = tokens_of(90, 2);
  const int length = static_cast<int>(prompt.size());
  const KVSpec kv = {kLayers, kKVHeads, kHeadDim, kBlockSize, kBlocks, is_bf16};
  std::vector<float> right;
  for (int num_threads = 1; num_threads <= 3; ++num_threads) {
    Runner runner(table, num_threads, Recorder(form, has_experts).spec, kv);
    poison(runner);
    const std::vector<float> whole = run_step(runner, {{prompt, 0, length, 0, 1}});
    if (right.empty()) right = whole;
    check.expect(whole.size() == kVocab && std::all_of(whole.begin(), whole.end(), [](float v) { return std::isfinite(v); }),
                 "%d threads: no finite logits", num_threads);
    if (whole.size() != kVocab) return;
    check.same_bits(whole.data(), right.data(), kVocab, "one step, threads", num_threads);
    // Pieces of 1 are for the last 20 tokens only: an emulated processor is slow.
    for (int piece : {num_threads == 1 ? 129 : num_threads == 2 ? 16 : 64, 1}) {
      poison(runner);
      std::vector<float> pieces;
      int step = 0;
      for (int first = 0, last_token = 0; first < length; first = last_token, ++step) {
        last_token = piece == 1 && first == 0 ? length - 20 : std::min(length, first + piece);
        const int beside = std::min(89, step);
        // Another row, one token further each step, in blocks between those of the first.
        pieces = run_step(runner, {{prompt, first, last_token, kBlocks - 2, -2}, {other, beside, beside + 1, 1, 2}});
      }
      check.expect(pieces.size() == kVocab, "%d threads, pieces of %d: no logits", num_threads, piece);
      if (pieces.size() == kVocab) check.same_bits(pieces.data(), right.data(), kVocab, "pieces of", piece);
    }
  }
}

// Gate and up, their activation and its rounding run as one operation, or as two: the same bits, whatever the tiles.
void test_gated(const KernelTable& table, Form form) {
  Check check(std::string(table.name) + " program, gate and up as one operation, " + form_name(form));
  const KVSpec kv = {kLayers, kKVHeads, kHeadDim, kBlockSize, kBlocks, true};
  const auto num_gated = [&](const ProgramSpec& spec) {
    const std::vector<Op> ops = compile(spec, kv).ops;
    return std::count_if(ops.begin(), ops.end(), [](const Op& op) { return op.kind == Op::gated; });
  };
  const ProgramSpec as_one = Recorder(form).spec, as_two = Recorder(form, false, true).spec;
  check.expect(num_gated(as_one) == (form == Form::f32 ? 0 : kLayers), "one operation a layer, but in f32");
  check.expect(num_gated(as_two) == 0, "none where somebody else reads its parts");
  check.expect(num_gated(Recorder(form, true).spec) == 0, "none of experts");
  for (int num_threads : {1, 3}) {
    Runner one(table, num_threads, as_one, kv), two(table, num_threads, as_two, kv);
    for (int length : {1, 2, 17, 48, 49, 64, 130}) {
      const std::vector<int32_t> prompt = tokens_of(length, 5);
      const std::vector<float> got = run_step(one, {{prompt, 0, length, 0, 1}}), right = run_step(two, {{prompt, 0, length, 0, 1}});
      check.expect(got.size() == kVocab && right.size() == kVocab, "%d tokens: no logits", length);
      if (got.size() == kVocab && right.size() == kVocab) check.same_bits(got.data(), right.data(), kVocab, "tokens", length);
    }
  }
}

StepInput empty_step(const int32_t* row_starts) {
  StepInput in{};
  in.row_starts = row_starts;
  in.num_groups = 1;
  return in;
}

// Two runners at once, each with threads of its own, and one that is closed while it works.
void test_company(const KernelTable& table) {
  Check check(std::string(table.name) + " runners side by side");
  const std::vector<int32_t> prompt = tokens_of(60, 3);
  const KVSpec kv = {kLayers, kKVHeads, kHeadDim, kBlockSize, kBlocks, true};
  Runner one(table, 2, Recorder(Form::int8).spec, kv), two(table, 3, Recorder(Form::int8).spec, kv);
  const std::vector<float> right = run_step(one, {{prompt, 0, 60, 0, 1}});
  std::vector<float> got[2];
  std::thread other([&] { for (int i = 0; i < 20; ++i) got[1] = run_step(two, {{prompt, 0, 60, 0, 1}}); });
  for (int i = 0; i < 20; ++i) got[0] = run_step(one, {{prompt, 0, 60, 0, 1}});
  other.join();
  for (int i = 0; i < 2; ++i) {
    check.expect(got[i].size() == kVocab && right.size() == kVocab, "runner %d: no logits", i);
    if (got[i].size() == kVocab && right.size() == kVocab) check.same_bits(got[i].data(), right.data(), kVocab, "runner", i);
  }
  const int32_t no_rows[] = {0};
  one.step(empty_step(no_rows), nullptr, nullptr, nullptr);
  bool was_refused = false;
  std::thread stepping([&] {
    try {
      for (;;) run_step(one, {{prompt, 0, 60, 0, 1}});
    } catch (const std::invalid_argument&) {
      was_refused = true;
    }
  });
  one.close();
  stepping.join();
  check.expect(was_refused, "a closed runner ran a step");
}

// One step of every row of `tokens`, a token each, behind those that it has: what was drawn is added.
void draw(Runner& runner, std::vector<std::vector<int32_t>>& tokens, std::vector<float>& logprobs, int num_rows) {
  const size_t rows = static_cast<size_t>(num_rows);
  const int64_t max_blocks = kPositions / kBlockSize / 8;
  std::vector<int32_t> token_ids, positions, row_starts{0}, wanted, tables;
  for (int row = 0; row < num_rows; ++row) {
    const std::vector<int32_t>& own = tokens[static_cast<size_t>(row)];
    token_ids.push_back(own.back());
    positions.push_back(static_cast<int32_t>(own.size()) - 1);
    row_starts.push_back(row + 1);
    wanted.push_back(row);
    for (int64_t i = 0; i < max_blocks; ++i) tables.push_back(static_cast<int32_t>(row * max_blocks + i));
  }
  const std::vector<float> temperature(rows, 0.8f), top_p(rows, 0.9f);
  const std::vector<int32_t> top_k(rows, 20);
  const std::vector<uint64_t> seed(rows, 7), position(positions.begin(), positions.end());
  const std::vector<uint32_t> index(rows, 0);
  const std::vector<uint8_t> wants_logprob(rows, 1);
  const StepInput in = {num_rows, num_rows, num_rows, 0, 1, max_blocks, token_ids.data(), positions.data(), row_starts.data(),
                        tables.data(), wanted.data(), nullptr,
                        {temperature.data(), top_k.data(), top_p.data(), seed.data(), index.data(), index.data(),
                         position.data(), wants_logprob.data()}};
  std::vector<int32_t> drawn(rows);
  std::vector<float> of_drawn(rows);
  runner.step(in, drawn.data(), of_drawn.data(), nullptr);
  for (size_t row = 0; row < rows; ++row) tokens[row].push_back(drawn[row]);
  logprobs.insert(logprobs.end(), of_drawn.begin(), of_drawn.end());
}

// Steps that begin before they are asked for, joined early, late or not at all: what they draw is what others draw.
void test_ahead(const KernelTable& table) {
  Check check(std::string(table.name) + " steps begun ahead");
  const KVSpec kv = {kLayers, kKVHeads, kHeadDim, kBlockSize, kBlocks, true};
  std::vector<std::vector<int32_t>> right;
  std::vector<float> right_logprobs;
  for (int num_threads = 1; num_threads <= 4; ++num_threads) {
    Runner runner(table, num_threads, Recorder(Form::int8).spec, kv, true);
    poison(runner);
    std::vector<std::vector<int32_t>> tokens(4, std::vector<int32_t>{3});
    std::vector<float> logprobs;
    Random random(1), pauses(static_cast<uint64_t>(num_threads));
    int num_rows = 4;
    for (int step = 0; step < 70; ++step) {
      if (random.below(5) == 0) num_rows = 1 + static_cast<int>(random.below(4));
      if (num_threads > 1) std::this_thread::sleep_for(std::chrono::microseconds(pauses.below(100)));
      draw(runner, tokens, logprobs, num_rows);
    }
    if (num_threads == 1) {
      right = tokens;
      right_logprobs = logprobs;
      continue;
    }
    check.expect(runner.num_joined() > 20, "%d threads: %d joined", num_threads, static_cast<int>(runner.num_joined()));
    check.expect(tokens == right, "%d threads: other tokens", num_threads);
    check.same_bits(logprobs.data(), right_logprobs.data(), static_cast<int64_t>(right_logprobs.size()), "threads", num_threads);
  }
}

}  // namespace

void test_program(const KernelTable& table) {
  for (Form form : {Form::f32, Form::bf16, Form::int8, Form::int4}) test_form(table, form, true);
  test_form(table, Form::int4, false);
  for (Form form : {Form::f32, Form::bf16, Form::int8, Form::int4}) test_gated(table, form);
  for (Form form : {Form::f32, Form::int8}) test_form(table, form, true, true);
  test_company(table);
  test_ahead(table);
}

}  // namespace paceline::test
