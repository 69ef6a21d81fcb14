// Python's view of packed weights, and every verb by itself for tests and measurements.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <thread>

#include "bind_arrays.h"
#include "cpu_features.h"
#include "pack.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

// nanobind's own complaint about a wrong array is a TypeError that lists signatures; callers want the argument's name.
template <class T, int N> In<T, N> array_argument(const char* name, const char* meaning, nb::handle given) {
  In<T, N> array;
  if (!nb::try_cast(given, array, false)) refuse(std::string(name) + ": needs a C-contiguous array of " + meaning);
  return array;
}
In<float, 2> float_rows(const char* name, nb::handle given) {
  return array_argument<float, 2>(name, "float32 with 2 dimensions", given);
}
In<float, 1> float_vector(const char* name, nb::handle given) {
  return array_argument<float, 1>(name, "float32 with 1 dimension", given);
}

void check_width(const char* name, int64_t got, int64_t wanted) {
  if (got != wanted) refuse(std::string(name) + ": has width " + std::to_string(got) + ", needs " + std::to_string(wanted));
}

// --- packing ---

PackedWeight pack_sources(const std::string& form, int64_t num_inputs, nb::sequence given, int num_threads,
                          const std::string& path) {
  using Raw = nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu>;
  std::vector<Source> sources;
  std::vector<Raw> raws;                         // keep the arrays alive while the lock is released
  std::vector<In<int64_t, 1>> orders;
  for (nb::handle item : given) {
    const std::string where = "sources[" + std::to_string(sources.size()) + "]";
    if (!nb::isinstance<nb::sequence>(item) || nb::len(item) != 3) refuse(where + ": needs (source_type, raw, row_order)");
    Source source{};
    Raw raw;
    if (!nb::try_cast(item[0], source.type)) refuse(where + ": source_type must be a string");
    if (!nb::try_cast(item[1], raw, false)) refuse(where + ": raw must be a uint8 array [num_outputs, row bytes]");
    if (raw.stride(1) != 1 && raw.shape(1) > 1) refuse(where + ": raw must have contiguous rows");
    source.rows = raw.data();
    source.num_rows = static_cast<int64_t>(raw.shape(0));
    source.row_bytes = static_cast<int64_t>(raw.shape(1));
    source.row_stride = raw.stride(0);
    raws.push_back(raw);
    if (nb::object order = item[2]; !order.is_none()) {
      orders.push_back(array_argument<int64_t, 1>((where + ".row_order").c_str(), "int64 with 1 dimension", order));
      if (static_cast<int64_t>(orders.back().shape(0)) != source.num_rows) refuse(where + ": row_order must name every row");
      source.row_order = orders.back().data();
    }
    sources.push_back(source);
  }
  const Form wanted = form_from_name(form);
  const KernelTable* kernels = path == "auto" ? nullptr : &find_table(path);
  nb::gil_scoped_release unlocked;
  return pack(wanted, num_inputs, sources, num_threads, kernels);
}

Out<float> unpack_weight(const PackedWeight& packed) {
  const Weight& w = packed.weight;
  Out<float> out = make_array<float>({static_cast<size_t>(w.num_outputs), static_cast<size_t>(w.num_inputs)});
  float* to = out.data();
  nb::gil_scoped_release unlocked;
  unpack(w, to);
  return out;
}

// --- one verb at a time ---

// A linear's input rows with the memory they need.
struct PreparedRows {
  PreparedRows(const KernelTable& table, Form form, const float* x, int64_t rows, int64_t num_inputs) {
    const size_t values = static_cast<size_t>(rows * num_inputs), groups = static_cast<size_t>(rows * (num_inputs / kGroup));
    in.x = x;
    if (form == Form::bf16) {
      bf16.resize(values);
      in.bf16 = bf16.data();
    } else if (form != Form::f32) {
      q.resize(values);
      scale.resize(groups);
      scaled_sum.resize(groups);
      start.resize(groups);
      in.q = q.data();
      in.scale = scale.data();
      in.scaled_sum = scaled_sum.data();
      in.start = start.data();
    }
    table.prepare(form, x, in, num_inputs, 0, rows);
  }

  Activations in{};
  std::vector<uint16_t> bf16;
  std::vector<int8_t> q;
  std::vector<float> scale, scaled_sum;
  std::vector<int32_t> start;
};

void linear_rows(const KernelTable& table, const Weight& w, const float* x, const float* bias, float* out, int64_t rows,
                 int64_t num_threads, int64_t row_step) {
  const PreparedRows prepared(table, w.form, x, rows, w.num_inputs);
  const auto share = [&](int64_t thread) {
    const int64_t first = w.num_strips * thread / num_threads, last = w.num_strips * (thread + 1) / num_threads;
    for (int64_t row = 0; row < rows; row += row_step) {
      table.linear(w, prepared.in, bias, out, w.num_outputs, row, std::min(rows, row + row_step), first, last);
    }
  };
  std::vector<std::thread> helpers;
  for (int64_t thread = 1; thread < num_threads; ++thread) helpers.emplace_back(share, thread);
  share(0);
  for (std::thread& helper : helpers) helper.join();
}

Out<float> linear(const std::string& path, const PackedWeight& packed, nb::object x_given, nb::object bias_given,
                  int64_t num_threads, std::optional<int64_t> row_tile_hint) {
  const KernelTable& table = find_table(path);
  const Weight& w = packed.weight;
  const auto x = float_rows("x", x_given);
  check_width("x", static_cast<int64_t>(x.shape(1)), w.num_inputs);
  In<float, 1> bias;
  if (!bias_given.is_none()) {
    bias = float_vector("bias", bias_given);
    check_width("bias", static_cast<int64_t>(bias.shape(0)), w.num_outputs);
  }
  if (num_threads < 1 || num_threads > 256) refuse("num_threads: must be from 1 to 256");
  if (row_tile_hint && *row_tile_hint < 1) refuse("row_tile_hint: must be at least 1");
  const int64_t rows = static_cast<int64_t>(x.shape(0));
  Out<float> out = make_array<float>({x.shape(0), static_cast<size_t>(w.num_outputs)});
  float* to = out.data();
  const float* bias_at = bias_given.is_none() ? nullptr : bias.data();
  nb::gil_scoped_release unlocked;
  linear_rows(table, w, x.data(), bias_at, to, rows, num_threads, row_tile_hint.value_or(std::max<int64_t>(rows, 1)));
  return out;
}

// For measurements: the kernel alone, on strips [first_strip, last_strip) of rows prepared once, `repeats` times.
void linear_into(const std::string& path, const PackedWeight& packed, nb::object x_given,
                 nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> out) {
  const KernelTable& table = find_table(path);
  const Weight& w = packed.weight;
  const auto x = float_rows("x", x_given);
  check_width("x", static_cast<int64_t>(x.shape(1)), w.num_inputs);
  check_width("out", static_cast<int64_t>(out.shape(1)), w.num_outputs);
  if (out.shape(0) < x.shape(0)) refuse("out: has fewer rows than x");
  const int64_t rows = static_cast<int64_t>(x.shape(0));
  float* to = out.data();
  nb::gil_scoped_release unlocked;
  linear_rows(table, w, x.data(), nullptr, to, rows, 1, std::max<int64_t>(rows, 1));
}

Out<float> embed(const std::string& path, const PackedWeight& packed, nb::object ids_given) {
  const KernelTable& table = find_table(path);
  const auto ids = array_argument<int32_t, 1>("ids", "int32 with 1 dimension", ids_given);
  for (size_t i = 0; i < ids.shape(0); ++i) {
    const int32_t id = ids.data()[i];
    if (id < 0 || id >= packed.weight.num_outputs) refuse("ids: " + std::to_string(id) + " is outside the table");
  }
  Out<float> out = make_array<float>({ids.shape(0), static_cast<size_t>(packed.weight.num_inputs)});
  float* to = out.data();
  nb::gil_scoped_release unlocked;
  table.embed(packed.weight, ids.data(), to, 0, static_cast<int64_t>(ids.shape(0)));
  return out;
}

Out<float> rms_norm(const std::string& path, nb::object x_given, nb::object weight_given, float eps) {
  const KernelTable& table = find_table(path);
  const auto x = float_rows("x", x_given);
  const auto weight = float_vector("weight", weight_given);
  check_width("weight", static_cast<int64_t>(weight.shape(0)), static_cast<int64_t>(x.shape(1)));
  Out<float> out = make_array<float>({x.shape(0), x.shape(1)});
  float* to = out.data();
  nb::gil_scoped_release unlocked;
  table.rms_norm(x.data(), weight.data(), eps, to, static_cast<int64_t>(x.shape(1)), 0, static_cast<int64_t>(x.shape(0)));
  return out;
}

Out<float> layer_norm(const std::string& path, nb::object x_given, nb::object weight_given, nb::object bias_given, float eps) {
  const KernelTable& table = find_table(path);
  const auto x = float_rows("x", x_given);
  const auto weight = float_vector("weight", weight_given);
  const int64_t width = static_cast<int64_t>(x.shape(1));
  check_width("weight", static_cast<int64_t>(weight.shape(0)), width);
  In<float, 1> bias;
  if (!bias_given.is_none()) {
    bias = float_vector("bias", bias_given);
    check_width("bias", static_cast<int64_t>(bias.shape(0)), width);
  }
  Out<float> out = make_array<float>({x.shape(0), x.shape(1)});
  float* to = out.data();
  const float* bias_at = bias_given.is_none() ? nullptr : bias.data();
  nb::gil_scoped_release unlocked;
  table.layer_norm(x.data(), weight.data(), bias_at, eps, to, width, 0, static_cast<int64_t>(x.shape(0)));
  return out;
}

// A verb that changes its rows in place, on a copy.
template <class F> Out<float> changed(nb::object x_given, F f) {
  const auto x = float_rows("x", x_given);
  Out<float> out = make_array<float>({x.shape(0), x.shape(1)});
  float* to = out.data();
  nb::gil_scoped_release unlocked;
  std::copy_n(x.data(), x.size(), to);
  f(to, static_cast<int64_t>(x.shape(1)), static_cast<int64_t>(x.shape(0)));
  return out;
}

Out<float> rms_norm_slices(const std::string& path, nb::object x_given, nb::object weight_given, float eps,
                           int64_t first_column, int64_t num_slices) {
  const KernelTable& table = find_table(path);
  const auto weight = float_vector("weight", weight_given);
  const int64_t width = static_cast<int64_t>(weight.shape(0));
  const int64_t row_width = static_cast<int64_t>(float_rows("x", x_given).shape(1));
  if (width < 1 || first_column < 0 || num_slices < 0 || first_column + num_slices * width > row_width) {
    refuse("num_slices: the slices do not fit x");
  }
  return changed(x_given, [&](float* to, int64_t stride, int64_t rows) {
    table.rms_norm_slices(to, weight.data(), eps, stride, first_column, width, num_slices, 0, rows);
  });
}

Out<float> scale(const std::string& path, nb::object x_given, float factor) {
  const KernelTable& table = find_table(path);
  return changed(x_given, [&](float* to, int64_t width, int64_t rows) { table.scale(to, factor, width, 0, rows); });
}

Out<float> softcap(const std::string& path, nb::object x_given, float cap) {
  const KernelTable& table = find_table(path);
  return changed(x_given, [&](float* to, int64_t width, int64_t rows) { table.softcap(to, cap, width, 0, rows); });
}

// silu_mul or gelu_tanh_mul.
template <auto KernelTable::* verb> Out<float> gated(const std::string& path, nb::object gate_up_given) {
  const KernelTable& table = find_table(path);
  const auto gate_up = float_rows("gate_up", gate_up_given);
  if (gate_up.shape(1) % 2 != 0) refuse("gate_up: needs an even width");
  const size_t inner = gate_up.shape(1) / 2;
  Out<float> out = make_array<float>({gate_up.shape(0), inner});
  float* to = out.data();
  nb::gil_scoped_release unlocked;
  (table.*verb)(gate_up.data(), to, static_cast<int64_t>(inner), 0, static_cast<int64_t>(gate_up.shape(0)));
  return out;
}

Out<float> add(const std::string& path, nb::object x_given, nb::object y_given, float scale) {
  const KernelTable& table = find_table(path);
  const auto x = float_rows("x", x_given), y = float_rows("y", y_given);
  check_width("y", static_cast<int64_t>(y.shape(1)), static_cast<int64_t>(x.shape(1)));
  if (x.shape(0) != y.shape(0)) refuse("y: needs as many rows as x");
  Out<float> out = make_array<float>({x.shape(0), x.shape(1)});
  float* to = out.data();
  nb::gil_scoped_release unlocked;
  std::copy_n(x.data(), x.size(), to);
  table.add(to, y.data(), scale, static_cast<int64_t>(x.shape(1)), 0, static_cast<int64_t>(x.shape(0)));
  return out;
}

Out<float> add_gated(const std::string& path, nb::object x_given, nb::object y_given, nb::object gate_given) {
  const KernelTable& table = find_table(path);
  const auto y = float_rows("y", y_given);
  const auto gate = float_vector("gate", gate_given);
  const auto x = float_rows("x", x_given);
  if (x.shape(0) != y.shape(0) || x.shape(1) != y.shape(1)) refuse("y: needs the shape of x");
  if (gate.shape(0) != x.shape(0)) refuse("gate: needs one entry for each row of x");
  return changed(x_given, [&](float* to, int64_t width, int64_t rows) {
    table.add_gated(to, y.data(), gate.data(), width, 0, rows);
  });
}

Out<float> route(const std::string& path, nb::object logits_given, int64_t top_k, bool renormalise) {
  const KernelTable& table = find_table(path);
  const auto logits = float_rows("logits", logits_given);
  const int64_t num_experts = static_cast<int64_t>(logits.shape(1));
  if (top_k < 1 || top_k > num_experts) refuse("top_k: must be from 1 to the number of experts");
  Out<float> out = make_array<float>({logits.shape(0), static_cast<size_t>(2 * top_k)});
  float* to = out.data();
  nb::gil_scoped_release unlocked;
  table.route(logits.data(), num_experts, top_k, renormalise, to, 0, static_cast<int64_t>(logits.shape(0)));
  return out;
}

Out<float> exp_of(const std::string& path, nb::object x_given) {
  const KernelTable& table = find_table(path);
  const auto x = float_vector("x", x_given);
  Out<float> out = make_array<float>({x.shape(0)});
  float* to = out.data();
  nb::gil_scoped_release unlocked;
  table.exp(x.data(), to, static_cast<int64_t>(x.shape(0)));
  return out;
}

nb::tuple quantize(const std::string& path, nb::object x_given) {
  const KernelTable& table = find_table(path);
  const auto x = float_rows("x", x_given);
  if (x.shape(1) % kGroup != 0) refuse("x: needs a width that is a multiple of 32");
  const size_t groups = x.shape(1) / kGroup;
  auto q = make_array<int8_t>({x.shape(0), x.shape(1)});
  auto scale = make_array<float>({x.shape(0), groups}), scaled_sum = make_array<float>({x.shape(0), groups});
  auto sum = make_array<int32_t>({x.shape(0), groups});
  Activations to{x.data(), nullptr, q.data(), scale.data(), scaled_sum.data(), sum.data()};
  {
    nb::gil_scoped_release unlocked;
    table.prepare(Form::int8, x.data(), to, static_cast<int64_t>(x.shape(1)), 0, static_cast<int64_t>(x.shape(0)));
  }
  for (size_t i = 0; i < sum.size(); ++i) sum.data()[i] /= -128;    // exact: it was multiplied by that
  return nb::make_tuple(q, scale, sum);
}

Out<uint16_t> round_bf16(const std::string& path, nb::object x_given) {
  const KernelTable& table = find_table(path);
  const auto x = float_rows("x", x_given);
  auto out = make_array<uint16_t>({x.shape(0), x.shape(1)});
  Activations to{};
  to.bf16 = out.data();
  nb::gil_scoped_release unlocked;
  table.prepare(Form::bf16, x.data(), to, static_cast<int64_t>(x.shape(1)), 0, static_cast<int64_t>(x.shape(0)));
  return out;
}

}  // namespace
}  // namespace paceline

void bind_linear(nb::module_& m) {
  using namespace paceline;
  m.def("paths", [] {
    std::vector<std::string> names;
    for (const KernelTable* table : available_tables()) names.push_back(table->name);
    return names;
  }, "Instruction-set paths this machine can run, best first.");
  m.def("cpu_features", [] {
    const auto features = paceline::cpu_features();
    return std::map<std::string, bool>(features.begin(), features.end());
  });
  m.def("max_tile_rows", [](const std::string& path) { return find_table(path).max_tile_rows; }, "path"_a);

  nb::class_<PackedWeight>(m, "PackedWeight")
      .def_prop_ro("form", [](const PackedWeight& p) { return form_name(p.weight.form); })
      .def_prop_ro("num_outputs", [](const PackedWeight& p) { return p.weight.num_outputs; })
      .def_prop_ro("num_inputs", [](const PackedWeight& p) { return p.weight.num_inputs; })
      .def_ro("num_bytes", &PackedWeight::num_bytes);
  m.def("pack", &pack_sources, "form"_a, "num_inputs"_a, "sources"_a, "num_threads"_a = 0, "path"_a = "auto",
        "sources: a list of (source_type, raw uint8 [num_outputs, row bytes], row_order int64 or None). num_threads 0: one "
        "a core.");
  m.def("unpack", &unpack_weight, "packed"_a);

  m.def("linear", &linear, "path"_a, "packed"_a, "x"_a, "bias"_a = nb::none(), "num_threads"_a = 1,
        "row_tile_hint"_a = nb::none());
  m.def("linear_into", &linear_into, "path"_a, "packed"_a, "x"_a, "out"_a.noconvert());
  m.def("embed", &embed, "path"_a, "packed"_a, "ids"_a);
  m.def("rms_norm", &rms_norm, "path"_a, "x"_a, "weight"_a, "eps"_a);
  m.def("layer_norm", &layer_norm, "path"_a, "x"_a, "weight"_a, "bias"_a.none(), "eps"_a);
  m.def("rms_norm_slices", &rms_norm_slices, "path"_a, "x"_a, "weight"_a, "eps"_a, "first_column"_a, "num_slices"_a);
  m.def("silu_mul", &gated<&KernelTable::silu_mul>, "path"_a, "gate_up"_a);
  m.def("gelu_tanh_mul", &gated<&KernelTable::gelu_tanh_mul>, "path"_a, "gate_up"_a);
  m.def("add", &add, "path"_a, "x"_a, "y"_a, "scale"_a = 1.0f);
  m.def("scale", &paceline::scale, "path"_a, "x"_a, "factor"_a);
  m.def("softcap", &softcap, "path"_a, "x"_a, "cap"_a);
  m.def("add_gated", &add_gated, "path"_a, "x"_a, "y"_a, "gate"_a);
  m.def("route", &route, "path"_a, "logits"_a, "top_k"_a, "renormalise"_a);
  m.def("exp", &exp_of, "path"_a, "x"_a);
  m.def("quantize", &quantize, "path"_a, "x"_a, "(q, scale, sum): what int8 and int4 kernels make of their input.");
  m.def("round_bf16", &round_bf16, "path"_a, "x"_a, "What the bf16 kernel makes of its input, as raw bits.");
}
