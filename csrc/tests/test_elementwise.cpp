// Verbs that work on one row at a time: the same bits alone and in company, and close to double precision.
#include <algorithm>
#include <functional>

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
  std::vector<int32_t> start(num_groups);
  table.prepare(form, x.data(), {x.data(), bf16.data(), q.data(), scale.data(), scaled_sum.data(), start.data()}, width, 0,
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
    check.expect(start[g] == -128 * total && scaled_sum[g] == scale[g] * static_cast<float>(total), "sum of group %d",
                 static_cast<int>(g));
  }
}

// layer_norm, rms_norm_slices, gelu_tanh_mul, scale, softcap: against double precision, and row by row.
struct Verb {
  const char* name;
  int64_t in_width, out_width;
  std::function<void(const float* x, float* out, int64_t first, int64_t last)> run;
  std::function<double(const float* row, int64_t i)> right;
};

void test_verb(const KernelTable& table, const Verb& verb) {
  Random random(static_cast<uint64_t>(verb.in_width) + 23);
  const std::vector<float> x = random.bells(kRows * verb.in_width, 4.0f);
  std::vector<float> whole(static_cast<size_t>(kRows * verb.out_width)), alone(whole.size());
  verb.run(x.data(), whole.data(), 0, kRows);
  const std::string label = std::string(table.name) + " " + verb.name + " " + std::to_string(verb.out_width);
  Check exact(label + " rows alone"), error(label + " error");
  for (int64_t row = 0; row < kRows; ++row) {
    verb.run(x.data(), alone.data(), row, row + 1);
    exact.same_bits(whole.data() + row * verb.out_width, alone.data() + row * verb.out_width, verb.out_width, "row", row);
    for (int64_t i = 0; i < verb.out_width; ++i) {
      const double right = verb.right(x.data() + row * verb.in_width, i);
      const double got = whole[static_cast<size_t>(row * verb.out_width + i)];
      error.expect(std::fabs(got - right) <= 5e-6 * std::fabs(right) + 5e-6, "row %d: %.9g, should be %.9g",
                   static_cast<int>(row), got, right);
    }
  }
}

double mean_of(const float* values, int64_t count, double centre, int power) {
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i) sum += std::pow(static_cast<double>(values[i]) - centre, power);
  return sum / static_cast<double>(count);
}

void test_more_verbs(const KernelTable& table, int64_t width) {
  Random random(static_cast<uint64_t>(width) + 29);
  const std::vector<float> weight = random.bells(width), bias = random.bells(width);
  const auto copy = [](const float* x, float* out, int64_t stride, int64_t first, int64_t last) {
    std::copy(x + first * stride, x + last * stride, out + first * stride);
  };
  test_verb(table, {"layer_norm", width, width, [&](const float* x, float* out, int64_t first, int64_t last) {
    table.layer_norm(x, weight.data(), bias.data(), 1e-5f, out, width, first, last);
  }, [&](const float* row, int64_t i) {
    const double mean = mean_of(row, width, 0.0, 1);
    const size_t at = static_cast<size_t>(i);
    return (row[i] - mean) / std::sqrt(mean_of(row, width, mean, 2) + 1e-5) * weight[at] + bias[at];
  }});
  const int64_t sliced = 3 * width + 5;    // two slices from column 5 on, one left alone
  test_verb(table, {"rms_norm_slices", sliced, sliced, [&](const float* x, float* out, int64_t first, int64_t last) {
    copy(x, out, sliced, first, last);
    table.rms_norm_slices(out, weight.data(), 1e-5f, sliced, 5, width, 2, first, last);
  }, [&](const float* row, int64_t i) {
    if (i < 5 || i >= 5 + 2 * width) return static_cast<double>(row[i]);
    const int64_t slice = 5 + (i - 5) / width * width;
    return row[i] / std::sqrt(mean_of(row + slice, width, 0.0, 2) + 1e-5) * weight[static_cast<size_t>(i - slice)];
  }});
  test_verb(table, {"gelu_tanh_mul", 2 * width, width, [&](const float* x, float* out, int64_t first, int64_t last) {
    table.gelu_tanh_mul(x, out, width, first, last);
  }, [&](const float* row, int64_t i) {
    const double gate = row[i];
    return 0.5 * gate * (1.0 + std::tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))) * row[width + i];
  }});
  test_verb(table, {"scale", width, width, [&](const float* x, float* out, int64_t first, int64_t last) {
    copy(x, out, width, first, last);
    table.scale(out, 0.22f, width, first, last);
  }, [&](const float* row, int64_t i) { return static_cast<double>(row[i] * 0.22f); }});
  test_verb(table, {"softcap", width, width, [&](const float* x, float* out, int64_t first, int64_t last) {
    copy(x, out, width, first, last);
    table.softcap(out, 3.0f, width, first, last);
  }, [&](const float* row, int64_t i) { return 3.0 * std::tanh(row[i] / 3.0); }});
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
    test_more_verbs(table, width);
  }
  for (Form form : {Form::bf16, Form::int8, Form::int4}) test_prepare(table, form);
  for (Form form : {Form::f32, Form::bf16, Form::int8, Form::int4}) test_embed(table, form);
}

}  // namespace paceline::test
