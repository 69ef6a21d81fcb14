// Verbs that work on one row at a time: the same bits alone and in company, and close to double precision.
#include "../pack.h"
#include "check.h"

namespace paceline::test {
namespace {

constexpr int kRows = 5;

void test_rms_norm(const KernelTable& table, int64_t width) {
  Random random(static_cast<uint64_t>(width));
  const std::vector<float> x = random.bells(kRows * width), weight = random.bells(width);
  std::vector<float> whole(x.size()), alone(static_cast<size_t>(width));
  table.rms_norm(x.data(), weight.data(), 1e-5f, whole.data(), width, 0, kRows);
  const std::string label = std::string(table.name) + " rms_norm " + std::to_string(width);
  Check exact(label + " rows alone"), error(label + " error");
  for (int64_t row = 0; row < kRows; ++row) {
    table.rms_norm(x.data() + row * width, weight.data(), 1e-5f, alone.data(), width, 0, 1);
    exact.same_bits(whole.data() + row * width, alone.data(), width, "row", row);
    double squares = 0.0;
    for (int64_t i = 0; i < width; ++i) squares += std::pow(static_cast<double>(x[static_cast<size_t>(row * width + i)]), 2);
    const double factor = 1.0 / std::sqrt(squares / static_cast<double>(width) + 1e-5);
    for (int64_t i = 0; i < width; ++i) {
      const double right = x[static_cast<size_t>(row * width + i)] * factor * weight[static_cast<size_t>(i)];
      const double got = whole[static_cast<size_t>(row * width + i)];
      error.expect(std::fabs(got - right) <= 3e-6 * std::fabs(right), "row %d: %.9g, should be %.9g",
                   static_cast<int>(row), got, right);
    }
  }
}

void test_silu_mul(const KernelTable& table, int64_t inner) {
  Random random(static_cast<uint64_t>(inner) + 7);
  std::vector<float> gate_up = random.bells(kRows * 2 * inner, 4.0f);
  gate_up[0] = 100.0f;      // saturates
  gate_up[1] = -100.0f;     // vanishes
  gate_up[2] = -1e30f;
  std::vector<float> whole(static_cast<size_t>(kRows * inner)), alone(static_cast<size_t>(inner));
  table.silu_mul(gate_up.data(), whole.data(), inner, 0, kRows);
  const std::string label = std::string(table.name) + " silu_mul " + std::to_string(inner);
  Check exact(label + " rows alone"), error(label + " error");
  for (int64_t row = 0; row < kRows; ++row) {
    table.silu_mul(gate_up.data() + row * 2 * inner, alone.data(), inner, 0, 1);
    exact.same_bits(whole.data() + row * inner, alone.data(), inner, "row", row);
    for (int64_t i = 0; i < inner; ++i) {
      const double gate = gate_up[static_cast<size_t>(row * 2 * inner + i)];
      const double up = gate_up[static_cast<size_t>((row * 2 + 1) * inner + i)];
      const double right = gate / (1.0 + std::exp(-gate)) * up;
      const double got = whole[static_cast<size_t>(row * inner + i)];
      error.expect(std::fabs(got - right) <= 3e-6 * std::fabs(right) + 1e-35, "gate %.9g: %.9g, should be %.9g", gate, got,
                   right);
    }
  }
}

void test_add(const KernelTable& table, int64_t width) {
  Random random(static_cast<uint64_t>(width) + 9);
  const std::vector<float> x = random.bells(kRows * width), y = random.bells(kRows * width);
  std::vector<float> whole = x, alone = x;
  table.add(whole.data(), y.data(), 1.0f, width, 0, kRows);
  for (int64_t row = 0; row < kRows; ++row) table.add(alone.data(), y.data(), 1.0f, width, row, row + 1);
  const std::string label = std::string(table.name) + " add " + std::to_string(width);
  Check exact(label);
  exact.same_bits(whole.data(), alone.data(), kRows * width, "rows", 0);
  for (size_t i = 0; i < x.size(); ++i) exact.expect(whole[i] == x[i] + y[i], "element %d", static_cast<int>(i));
}

void test_prepare(const KernelTable& table, Form form) {
  const int64_t width = 96;
  Random random(11);
  std::vector<float> x = random.bells(kRows * width, 3.0f);
  for (int i = 0; i < kGroup; ++i) x[static_cast<size_t>(width + i)] = 0.0f;    // a group without scale
  const size_t num_groups = x.size() / kGroup;
  std::vector<uint16_t> bf16(x.size());
  std::vector<int8_t> q(x.size());
  std::vector<float> scale(num_groups), scaled_sum(num_groups);
  std::vector<int32_t> sum(num_groups);
  table.prepare(form, x.data(), {x.data(), bf16.data(), q.data(), scale.data(), scaled_sum.data(), sum.data()}, width, 0,
                kRows);
  Check check(std::string(table.name) + " prepare " + form_name(form));
  for (size_t i = 0; i < x.size(); ++i) {
    if (form == Form::bf16) {
      check.expect(bf16[i] == to_bf16(x[i]), "element %d", static_cast<int>(i));
    } else {
      const float d = scale[i / kGroup];
      check.expect(std::fabs(static_cast<double>(d) * q[i] - x[i]) <= 0.501 * d, "element %d: %.9g as %d x %.9g",
                   static_cast<int>(i), static_cast<double>(x[i]), q[i], static_cast<double>(d));
    }
  }
  for (size_t g = 0; form != Form::bf16 && g < num_groups; ++g) {
    int32_t total = 0;
    for (size_t i = 0; i < kGroup; ++i) total += q[g * kGroup + i];
    check.expect(sum[g] == total && scaled_sum[g] == scale[g] * static_cast<float>(total), "sum of group %d",
                 static_cast<int>(g));
  }
}

void test_embed(const KernelTable& table, Form form) {
  const int64_t vocab_size = 50, width = 64;
  Random random(13);
  const std::vector<float> values = random.bells(vocab_size * width, 0.1f);
  const Source source{"F32", reinterpret_cast<const uint8_t*>(values.data()), vocab_size, width * 4, width * 4, nullptr};
  const PackedWeight packed = pack(form, width, {source});
  std::vector<float> unpacked(values.size());
  unpack(packed.weight, unpacked.data());
  const int32_t token_ids[] = {0, 49, 17, 16, 15, 49};
  std::vector<float> out(6 * static_cast<size_t>(width));
  table.embed(packed.weight, token_ids, out.data(), 0, 2);
  table.embed(packed.weight, token_ids, out.data(), 2, 6);
  Check check(std::string(table.name) + " embed " + form_name(form));
  for (int64_t row = 0; row < 6; ++row) {
    check.same_bits(out.data() + row * width, unpacked.data() + token_ids[row] * width, width, "row", row);
  }
}

}  // namespace

void test_elementwise(const KernelTable& table) {
  for (int64_t width : {16, 64, 70, 576}) {
    test_rms_norm(table, width);
    test_silu_mul(table, width);
    test_add(table, width);
  }
  for (Form form : {Form::bf16, Form::int8, Form::int4}) test_prepare(table, form);
  for (Form form : {Form::f32, Form::bf16, Form::int8, Form::int4}) test_embed(table, form);
}

}  // namespace paceline::test
