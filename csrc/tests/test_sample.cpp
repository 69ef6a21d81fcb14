// The sampler: greedy and drawn tokens depend on their own row only; draws follow the distribution that was asked for.
#include <algorithm>
#include <numeric>

#include "check.h"

namespace paceline::test {
namespace {

struct Params {
  float temperature = 1.0f;
  int32_t top_k = 0;    // 0: the whole vocabulary
  float top_p = 1.0f;
  uint64_t seed = 0;
  uint32_t prompt_index = 0, choice_index = 0;
  uint64_t position = 0;
};

struct Drawn {
  int32_t token;
  float logprob;
};

// Draws as row `index` of a batch whose other rows hold other parameters.
Drawn draw(const KernelTable& table, const std::vector<float>& logits, const Params& p, int index = 0,
           const SamplingExtras* extras = nullptr, const int32_t* entry_of = nullptr) {
  const size_t rows = static_cast<size_t>(index) + 2, at = static_cast<size_t>(index);
  std::vector<float> temperature(rows, 0.3f), top_p(rows, 0.5f);
  std::vector<int32_t> top_k(rows, 2);
  std::vector<uint64_t> seed(rows, 77), position(rows, 5);
  std::vector<uint32_t> prompt_index(rows, 3), choice_index(rows, 4);
  std::vector<uint8_t> wants_logprob(rows, 0);
  temperature[at] = p.temperature;
  top_k[at] = p.top_k;
  top_p[at] = p.top_p;
  seed[at] = p.seed;
  position[at] = p.position;
  prompt_index[at] = p.prompt_index;
  choice_index[at] = p.choice_index;
  wants_logprob[at] = 1;
  const Sampling sampling = {temperature.data(),  top_k.data(),        top_p.data(),    seed.data(),
                             prompt_index.data(), choice_index.data(), position.data(), wants_logprob.data(),
                             extras,              entry_of};
  const int64_t vocab_size = static_cast<int64_t>(logits.size());
  std::vector<uint8_t> scratch(table.sample_scratch_bytes(vocab_size) + 64, 0xee);    // whatever an earlier row left
  void* aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
  std::vector<float> logprob(rows, -5.0f);
  const int32_t token = table.sample(logits.data(), vocab_size, sampling, index, logprob.data() + index, aligned);
  return {token, logprob[at]};
}

double log_sum(const std::vector<float>& logits) {
  const double most = *std::max_element(logits.begin(), logits.end());
  double total = 0.0;
  for (float logit : logits) total += std::exp(logit - most);
  return most + std::log(total);
}

void test_greedy(const KernelTable& table, int64_t vocab_size) {
  Check check(std::string(table.name) + " greedy " + std::to_string(vocab_size));
  Random random(static_cast<uint64_t>(vocab_size));
  Params greedy;
  greedy.temperature = 0.0f;
  for (int round = 0; round < 20; ++round) {
    std::vector<float> logits = random.bells(vocab_size, 3.0f);
    const int64_t low = random.below(vocab_size), high = random.below(vocab_size);
    logits[static_cast<size_t>(low)] = logits[static_cast<size_t>(high)] = 30.0f;    // a tie: the lower id wins
    const Drawn drawn = draw(table, logits, greedy, round);
    check.expect(drawn.token == std::min(low, high), "got %d, should be %d", drawn.token,
                 static_cast<int>(std::min(low, high)));
    const double right = 30.0 - log_sum(logits);
    check.expect(std::fabs(drawn.logprob - right) <= 2e-5, "log-probability %.9g, should be %.9g",
                 static_cast<double>(drawn.logprob), right);
  }
}

void test_not_finite(const KernelTable& table) {
  Check check(std::string(table.name) + " logits that are not finite");
  const float nan = std::nanf("");
  for (float temperature : {0.0f, 1.0f}) {
    Params p;
    p.temperature = temperature;
    check.expect(draw(table, std::vector<float>(100, nan), p).token == -1, "all NaN must be refused");
    check.expect(draw(table, std::vector<float>(100, -__builtin_inff()), p).token == -1, "all -inf must be refused");
    std::vector<float> banned(100, -__builtin_inff());
    banned[42] = -3.0f;
    check.expect(draw(table, banned, p).token == 42, "the only finite logit must win");
  }
}

// The probabilities that temperature, then top_k, then top_p leave, in double precision. Ties go to the lower id.
std::vector<double> allowed(const std::vector<float>& logits, const Params& p) {
  std::vector<size_t> order(logits.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  if (p.top_k > 0) order.resize(std::min(order.size(), static_cast<size_t>(p.top_k)));
  std::vector<double> weights(logits.size(), 0.0);
  double total = 0.0, sum = 0.0, kept = 0.0;
  for (size_t id : order) total += weights[id] = std::exp((logits[id] - logits[order[0]]) / static_cast<double>(p.temperature));
  for (size_t id : order) {
    if (sum >= static_cast<double>(p.top_p) * total && id != order[0]) weights[id] = 0.0;
    sum += weights[id];
    kept += weights[id];
  }
  for (double& weight : weights) weight /= kept;
  return weights;
}

void test_distribution(const KernelTable& table, const char* what, Params p, int64_t vocab_size, float spread) {
  Check check(std::string(table.name) + " distribution, " + what);
  Random random(5);
  const std::vector<float> logits = random.bells(vocab_size, spread);
  const std::vector<double> wanted = allowed(logits, p);
  const int num_draws = 20000;
  std::vector<int> counts(logits.size(), 0);
  for (int i = 0; i < num_draws; ++i) {
    p.position = static_cast<uint64_t>(i);
    const int32_t token = draw(table, logits, p).token;
    check.expect(token >= 0 && token < vocab_size, "token %d", token);
    if (token >= 0 && token < vocab_size) ++counts[static_cast<size_t>(token)];
  }
  for (size_t id = 0; id < counts.size(); ++id) {
    const double expected = wanted[id] * num_draws;
    const double slack = 5.0 * std::sqrt(expected * (1.0 - wanted[id])) + 4.0 * (expected > 0.0);
    check.expect(std::fabs(counts[id] - expected) <= slack, "token %d was drawn %d times, expected %.1f",
                 static_cast<int>(id), counts[id], expected);
  }
}

void test_own_row_only(const KernelTable& table, int64_t vocab_size) {
  Check check(std::string(table.name) + " draws depend on their own row, " + std::to_string(vocab_size));
  Random random(21);
  int num_changed_seed = 0, num_changed_position = 0, num_changed_choice = 0, num_changed_prompt = 0;
  for (int round = 0; round < 60; ++round) {
    const std::vector<float> logits = random.bells(vocab_size, 1.0f);
    Params p;
    p.temperature = 0.5f + random.uniform();
    p.top_k = round % 3 == 0 ? 50 : 0;
    p.top_p = round % 2 == 0 ? 0.9f : 1.0f;
    p.seed = random.next();
    p.position = static_cast<uint64_t>(round);
    const Drawn first = draw(table, logits, p), again = draw(table, logits, p, 7);
    check.expect(first.token == again.token && first.logprob == again.logprob, "another place in the batch: %d and %d",
                 first.token, again.token);
    check.expect(std::fabs(first.logprob - (logits[static_cast<size_t>(first.token)] - log_sum(logits))) <= 2e-5,
                 "log-probability %.9g is not the raw one", static_cast<double>(first.logprob));
    Params other = p;
    other.seed ^= 1;
    num_changed_seed += draw(table, logits, other).token != first.token;
    other = p;
    other.position += 1000;
    num_changed_position += draw(table, logits, other).token != first.token;
    other = p;
    other.choice_index = 1;
    num_changed_choice += draw(table, logits, other).token != first.token;
    other = p;
    other.prompt_index = 1;
    num_changed_prompt += draw(table, logits, other).token != first.token;
  }
  const int least = std::min(std::min(num_changed_seed, num_changed_position), std::min(num_changed_choice, num_changed_prompt));
  check.expect(least > 40, "seed, position, choice and prompt index must each change the draw: %d of 60", least);
}

// One row with everything: what may be drawn is worked out by hand, and the best tokens are those of the row as it came.
void test_extras(const KernelTable& table, int64_t vocab_size) {
  Check check(std::string(table.name) + " extras " + std::to_string(vocab_size));
  Random random(static_cast<uint64_t>(vocab_size));
  std::vector<float> logits(static_cast<size_t>(vocab_size));
  for (float& logit : logits) logit = static_cast<float>(random.below(200)) * 0.01f - 4.0f;
  logits[3] = 5.0f;     // banned
  logits[5] = 4.5f;     // in the output twice: 4.5 / 1.5 - 2 * 0.6 - 0.3 = 1.5
  logits[7] = 4.4f;     // biased down by 3
  logits[9] = 2.0f;     // the largest that is left
  logits[11] = 1.9f;    // drawn too, above min_p
  const std::vector<int32_t> zero_then(2, 0), rows = {1}, ids5 = {5, 5, 5}, history_starts = {0, 3}, banned_starts = {0, 1},
                             banned = {3}, biased = {7}, one = {1}, three = {3}, none = {-1};
  const std::vector<float> bias = {-3.0f}, min_p = {0.8f}, typical = {1.0f}, repetition = {1.5f}, presence = {0.3f},
                           frequency = {0.6f};
  std::vector<int32_t> top_ids(3, -1), entry_of = {-1, 0};
  std::vector<float> top_logprobs(3, 0.0f);
  SamplingExtras extras{};
  extras.count = 1;
  extras.rows = rows.data();
  extras.min_p = min_p.data();
  extras.typical_p = typical.data();
  extras.repetition_penalty = repetition.data();
  extras.presence_penalty = presence.data();
  extras.frequency_penalty = frequency.data();
  extras.num_prompt = one.data();
  extras.num_top = three.data();
  extras.target = none.data();
  extras.history = {history_starts.data(), ids5.data()};
  extras.allowed = {zero_then.data(), banned.data()};
  extras.banned = {banned_starts.data(), banned.data()};
  extras.biased = {banned_starts.data(), biased.data()};
  extras.bias = bias.data();
  extras.top_width = 3;
  extras.top_ids = top_ids.data();
  extras.top_logprobs = top_logprobs.data();
  int num_nine = 0, num_eleven = 0;
  for (uint64_t position = 0; position < 200; ++position) {
    Params p;
    p.position = position;
    const int32_t token = draw(table, logits, p, 1, &extras, entry_of.data()).token;
    num_nine += token == 9;
    num_eleven += token == 11;
  }
  check.expect(num_nine + num_eleven == 200 && num_nine > 60 && num_eleven > 60, "drew %d and %d", num_nine, num_eleven);
  const double total = log_sum(logits);
  for (int i = 0; i < 3; ++i) {
    const int32_t expected = 3 + 2 * i;
    check.expect(top_ids[static_cast<size_t>(i)] == expected, "best %d is %d", i, top_ids[static_cast<size_t>(i)]);
    const double logprob = static_cast<double>(logits[static_cast<size_t>(expected)]) - total;
    check.expect(std::fabs(static_cast<double>(top_logprobs[static_cast<size_t>(i)]) - logprob) < 1e-5, "logprob %d", i);
  }
}

}  // namespace

void test_sample(const KernelTable& table) {
  for (int64_t vocab_size : {17, 100, 4099, 49152}) test_greedy(table, vocab_size);
  test_not_finite(table);
  Params p;
  test_distribution(table, "temperature 1", p, 40, 1.5f);
  p.temperature = 0.6f;
  test_distribution(table, "temperature 0.6", p, 40, 1.5f);
  p.top_k = 7;
  test_distribution(table, "top_k 7", p, 40, 1.5f);
  p.top_k = 0;
  p.top_p = 0.8f;
  test_distribution(table, "top_p 0.8", p, 40, 1.5f);
  p.top_k = 12;
  p.temperature = 1.5f;
  test_distribution(table, "top_k 12 and top_p 0.8", p, 40, 1.5f);
  test_own_row_only(table, 1000);
  test_own_row_only(table, 49152);
  for (int64_t vocab_size : {17, 100, 4099, 49152}) test_extras(table, vocab_size);
}

}  // namespace paceline::test
