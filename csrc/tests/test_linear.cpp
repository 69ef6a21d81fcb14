// linear and prepare: a row's result is the same bits whatever stands beside it and however the work is split.
#include <algorithm>

#include "../pack.h"
#include "check.h"

namespace paceline::test {
namespace {

constexpr Form kForms[] = {Form::f32, Form::bf16, Form::int8, Form::int4};

// Prepared rows that own their memory.
struct Prepared {
  Prepared(const KernelTable& table, Form form, const float* rows, int64_t num_rows, int64_t num_inputs)
      : x(rows, rows + num_rows * num_inputs), bf16(x.size()), q(x.size()), scale(x.size() / kGroup + 1),
        scaled_sum(scale.size()), sum(scale.size()) {
    view = {x.data(), bf16.data(), q.data(), scale.data(), scaled_sum.data(), sum.data()};
    table.prepare(form, x.data(), view, num_inputs, 0, num_rows);
  }
  std::vector<float> x;
  std::vector<uint16_t> bf16;
  std::vector<int8_t> q;
  std::vector<float> scale, scaled_sum;
  std::vector<int32_t> sum;
  Activations view;
};

PackedWeight random_weight(Form form, int64_t num_outputs, int64_t num_inputs, Random& random) {
  const std::vector<float> values = random.bells(num_outputs * num_inputs, 0.05f);
  const Source source{"F32", reinterpret_cast<const uint8_t*>(values.data()), num_outputs, num_inputs * 4, num_inputs * 4,
                      nullptr};
  return pack(form, num_inputs, {source});
}

// What the kernel multiplies with: the input after the form's rounding.
double seen_input(Form form, const Prepared& rows, int64_t num_inputs, int64_t row, int64_t k) {
  const size_t at = static_cast<size_t>(row * num_inputs + k);
  if (form == Form::f32) return rows.x[at];
  if (form == Form::bf16) return from_bf16(rows.bf16[at]);
  return static_cast<double>(rows.q[at]) * rows.scale[at / kGroup];
}

struct Case {
  std::string label;
  const KernelTable& table;
  const Weight& weight;
  const std::vector<float>& bias;
  const std::vector<float>& inputs;
  int64_t num_rows;
};

std::vector<float> run_whole(const Case& c, int64_t stride) {
  const Prepared rows(c.table, c.weight.form, c.inputs.data(), c.num_rows, c.weight.num_inputs);
  std::vector<float> out(static_cast<size_t>(c.num_rows * stride), -1.0f);
  c.table.linear(c.weight, rows.view, c.bias.data(), out.data(), stride, 0, c.num_rows, 0, c.weight.num_strips);
  return out;
}

void check_rows_alone(const Case& c, const std::vector<float>& whole, int64_t stride) {
  Check check(c.label + " rows alone");
  for (int64_t row = 0; row < c.num_rows; ++row) {
    const Prepared alone(c.table, c.weight.form, c.inputs.data() + row * c.weight.num_inputs, 1, c.weight.num_inputs);
    std::vector<float> out(static_cast<size_t>(stride), -1.0f);
    c.table.linear(c.weight, alone.view, c.bias.data(), out.data(), stride, 0, 1, 0, c.weight.num_strips);
    check.same_bits(whole.data() + row * stride, out.data(), stride, "row", row);
  }
}

void check_split(const Case& c, const std::vector<float>& whole, int64_t stride, Random& random) {
  Check check(c.label + " split");
  const Prepared rows(c.table, c.weight.form, c.inputs.data(), c.num_rows, c.weight.num_inputs);
  std::vector<float> out(whole.size(), -1.0f);
  for (int64_t row = 0; row < c.num_rows;) {
    const int64_t next_row = std::min(c.num_rows, row + 1 + random.below(c.num_rows));
    for (int64_t strip = 0; strip < c.weight.num_strips;) {
      const int64_t next_strip = std::min(c.weight.num_strips, strip + 1 + random.below(c.weight.num_strips));
      c.table.linear(c.weight, rows.view, c.bias.data(), out.data(), stride, row, next_row, strip, next_strip);
      strip = next_strip;
    }
    row = next_row;
  }
  check.same_bits(out.data(), whole.data(), static_cast<int64_t>(whole.size()), "split", 0);
}

void check_error(const Case& c, const std::vector<float>& whole, int64_t stride) {
  Check check(c.label + " error");
  const int64_t num_inputs = c.weight.num_inputs;
  const Prepared rows(c.table, c.weight.form, c.inputs.data(), c.num_rows, num_inputs);
  std::vector<float> weights(static_cast<size_t>(c.weight.num_outputs * num_inputs));
  unpack(c.weight, weights.data());
  for (int64_t row = 0; row < c.num_rows; ++row) {
    for (int64_t output = 0; output < c.weight.num_outputs; ++output) {
      double exact = c.bias[static_cast<size_t>(output)], magnitude = std::fabs(exact);
      for (int64_t k = 0; k < num_inputs; ++k) {
        const double product = seen_input(c.weight.form, rows, num_inputs, row, k) *
                               static_cast<double>(weights[static_cast<size_t>(output * num_inputs + k)]);
        exact += product;
        magnitude += std::fabs(product);
      }
      // One rounding of at most 2^-24 of the running magnitude for each input and the bias; twice that leaves room for
      // forms whose scale and minimum are applied separately.
      const double bound = static_cast<double>(num_inputs + 8) * 0x1p-23 * magnitude;
      const double got = whole[static_cast<size_t>(row * stride + output)];
      check.expect(std::fabs(got - exact) <= bound, "row %d output %d is %.9g, should be %.9g", static_cast<int>(row),
                   static_cast<int>(output), got, exact);
    }
  }
}

void check_untouched(const Case& c, const std::vector<float>& whole, int64_t stride) {
  Check check(c.label + " stays inside");
  for (int64_t row = 0; row < c.num_rows; ++row) {
    for (int64_t column = c.weight.num_outputs; column < stride; ++column) {
      check.expect(whole[static_cast<size_t>(row * stride + column)] == -1.0f, "row %d column %d was written",
                   static_cast<int>(row), static_cast<int>(column));
    }
  }
}

void test_shape(const KernelTable& table, Form form, int64_t num_outputs, int64_t num_inputs) {
  Random random(static_cast<uint64_t>(num_outputs * 1000 + num_inputs + static_cast<int>(form)));
  const PackedWeight packed = random_weight(form, num_outputs, num_inputs, random);
  const int64_t most_rows = 2 * table.max_tile_rows + 3;
  const std::vector<float> inputs = random.bells(most_rows * num_inputs);
  const std::vector<float> bias = random.bells(num_outputs);
  const int64_t stride = num_outputs + 24;
  for (int64_t num_rows = 1; num_rows <= most_rows; ++num_rows) {
    const std::string label = std::string(table.name) + " linear " + form_name(form) + " " + std::to_string(num_rows) +
                              "x" + std::to_string(num_inputs) + "x" + std::to_string(num_outputs);
    const Case c{label, table, packed.weight, bias, inputs, num_rows};
    const std::vector<float> whole = run_whole(c, stride);
    check_rows_alone(c, whole, stride);
    check_split(c, whole, stride, random);
    check_untouched(c, whole, stride);
    if (num_rows == most_rows) check_error(c, whole, stride);
  }
}

void test_no_bias(const KernelTable& table, Form form) {
  Check check(std::string(table.name) + " linear " + form_name(form) + " without bias");
  Random random(3);
  const PackedWeight packed = random_weight(form, 48, 64, random);
  const std::vector<float> inputs = random.bells(64), zeros(48, 0.0f);
  const Prepared row(table, form, inputs.data(), 1, 64);
  float with_zeros[48], without[48];
  table.linear(packed.weight, row.view, zeros.data(), with_zeros, 48, 0, 1, 0, 3);
  table.linear(packed.weight, row.view, nullptr, without, 48, 0, 1, 0, 3);
  for (int i = 0; i < 48; ++i) check.expect(with_zeros[i] == without[i], "output %d differs", i);
}

// A weight whose scales are powers of two may go another way, which no bit may show: not of rows that have a group of
// zeros, of values too small or too large for that way, or of no numbers at all, nor of those beside them.
void test_power_scales(const KernelTable& table) {
  Check check(std::string(table.name) + " linear int8, scales that are powers of two");
  constexpr int64_t num_inputs = 96, num_outputs = 40, num_rows = 7;
  Random random(11);
  const PackedWeight packed = random_weight(Form::int8, num_outputs, num_inputs, random);
  check.expect(packed.weight.has_power_scales, "rounded values have them");
  Weight plain = packed.weight;
  plain.has_power_scales = false;
  std::vector<float> inputs = random.bells(num_rows * num_inputs);
  const float odd[num_rows] = {1.0f, 0.0f, NAN, INFINITY, 1e-35f, 1e34f, 1.0f};    // what row r's second group is made of
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t k = kGroup; k < 2 * kGroup; ++k) inputs[static_cast<size_t>(row * num_inputs + k)] *= odd[row];
  }
  const std::vector<float> bias = random.bells(num_outputs);
  const Case c{"", table, packed.weight, bias, inputs, num_rows}, expected{"", table, plain, bias, inputs, num_rows};
  const std::vector<float> whole = run_whole(c, num_outputs), right = run_whole(expected, num_outputs);
  check.same_bits(whole.data(), right.data(), num_rows * num_outputs, "together", 0);
  for (int64_t row = 0; row < num_rows; ++row) {
    const auto at = inputs.begin() + row * num_inputs;
    const std::vector<float> own(at, at + num_inputs);
    const std::vector<float> alone = run_whole({"", table, packed.weight, bias, own, 1}, num_outputs);
    check.same_bits(alone.data(), right.data() + row * num_outputs, num_outputs, "row", row);
    const bool is_finite = std::isfinite(odd[row]);
    for (const float value : alone) check.expect(std::isfinite(value) == is_finite, "row %d: %g", static_cast<int>(row), value);
  }
  const std::vector<uint8_t> q8_0 = {0x00, 0x36, 1, 2, 3};    // d = 0.375
  std::vector<uint8_t> block(34, 5);
  std::copy(q8_0.begin(), q8_0.end(), block.begin());
  const PackedWeight own_scale = pack(Form::int8, kGroup, {Source{"Q8_0", block.data(), 1, 34, 34, nullptr}});
  check.expect(!own_scale.weight.has_power_scales, "a file's own scale is kept");
}

}  // namespace

void test_linear(const KernelTable& table) {
  for (Form form : kForms) {
    test_shape(table, form, 40, 64);      // the last strip is half empty
    test_shape(table, form, 96, 576);
    test_no_bias(table, form);
  }
  test_power_scales(table);
  test_shape(table, Form::f32, 17, 33);    // f32 takes any number of inputs
  test_shape(table, Form::bf16, 17, 34);
}

}  // namespace paceline::test
