#include "program.h"

#include <algorithm>
#include <limits>
#include <set>
#include <stdexcept>

namespace paceline {

namespace {

const std::map<std::string, Verb>& verbs() {
  static const std::map<std::string, Verb> table = {
      {"embed", Verb::embed}, {"rms_norm", Verb::rms_norm}, {"layer_norm", Verb::layer_norm},
      {"rms_norm_slices", Verb::rms_norm_slices}, {"linear", Verb::linear}, {"rope_write_kv", Verb::rope_write_kv},
      {"paged_attention", Verb::paged_attention}, {"silu_mul", Verb::silu_mul}, {"gelu_tanh_mul", Verb::gelu_tanh_mul},
      {"add", Verb::add}, {"add_gated", Verb::add_gated}, {"scale", Verb::scale}, {"softcap", Verb::softcap},
      {"route", Verb::route}, {"gather_routed", Verb::gather_routed}, {"expert_linear", Verb::expert_linear},
      {"combine_routed", Verb::combine_routed}, {"select_wanted", Verb::select_wanted}, {"sample", Verb::sample},
  };
  return table;
}

constexpr int64_t kMaxWidth = int64_t{1} << 30;     // so that sizes in bytes stay far from overflow
constexpr int64_t kMaxLayers = int64_t{1} << 12;    // and of heads
constexpr int32_t kNoLayer = -1;                    // a group's window before any of its layers is seen

constexpr int64_t kMaxExperts = int64_t{1} << 16;   // ids are kept as floats, exactly

const char* name_of(Rows rows) {
  switch (rows) {
    case Rows::tokens: return "tokens";
    case Rows::wanted: return "wanted";
    case Rows::routed: return "routed";
  }
  return "";
}

std::string text(int64_t number) { return std::to_string(number); }

// Reads one node, complaining in its name.
class NodeReader {
 public:
  NodeReader(const ProgramSpec& spec, size_t index, const std::map<int64_t, int>& buffer_index)
      : spec_(spec), node_(spec.nodes[index]), index_(index), buffer_index_(buffer_index) {}

  [[noreturn]] void fail(const std::string& why) const {
    throw std::invalid_argument("node " + text(static_cast<int64_t>(index_)) + " (" + node_.verb + "): " + why);
  }
  void require(bool holds, const std::string& why) const {
    if (!holds) fail(why);
  }

  Verb verb() const {
    const auto found = verbs().find(node_.verb);
    if (found == verbs().end()) {
      std::string names;
      for (const auto& entry : verbs()) names += (names.empty() ? "" : ", ") + entry.first;
      fail("unknown verb; choose from " + names);
    }
    return found->second;
  }

  void shape(size_t num_inputs, bool has_output, size_t min_weights, size_t max_weights,
             const std::set<std::string>& attrs) const {
    require(node_.inputs.size() == num_inputs, "takes " + text(static_cast<int64_t>(num_inputs)) + " inputs, got " +
                                                   text(static_cast<int64_t>(node_.inputs.size())));
    require((node_.output >= 0) == has_output, has_output ? "needs an output" : "has no output");
    require(node_.weights.size() >= min_weights && node_.weights.size() <= max_weights,
            "wrong number of weights: " + text(static_cast<int64_t>(node_.weights.size())));
    for (const auto& entry : node_.attrs) require(attrs.count(entry.first) > 0, "unknown attribute " + entry.first);
  }

  int buffer(int64_t id) const {
    const auto found = buffer_index_.find(id);
    require(found != buffer_index_.end(), "unknown buffer " + text(id));
    return found->second;
  }
  int input(size_t i) const { return buffer(node_.inputs[i]); }
  int output() const { return buffer(node_.output); }
  const BufferSpec& spec_of(int buffer) const { return spec_.buffers[static_cast<size_t>(buffer)]; }

  void width(int buffer, int64_t expected) const {
    const BufferSpec& found = spec_of(buffer);
    require(found.width == expected, "buffer " + text(found.id) + " is " + text(found.width) + " wide, needs " + text(expected));
  }
  void rows(int buffer, Rows rows) const {
    require(spec_of(buffer).rows == rows, "buffer " + text(spec_of(buffer).id) + " must have the rows of " + name_of(rows));
  }

  const WeightSpec& weight(size_t i, bool is_packed) const {
    const auto found = spec_.weights.find(node_.weights[i]);
    require(found != spec_.weights.end(), "unknown weight " + node_.weights[i]);
    require(found->second.is_packed == is_packed,
            "weight " + node_.weights[i] + (is_packed ? " must be packed" : " must be a float32 array"));
    return found->second;
  }
  const float* vector(size_t i, int64_t size) const {
    const WeightSpec& found = weight(i, false);
    require(found.rows == 1 && found.columns == size,
            "weight " + node_.weights[i] + " has shape " + text(found.rows) + " x " + text(found.columns) +
                ", needs a vector of " + text(size));
    return found.values.data();
  }

  double attr(const std::string& name) const {
    const auto found = node_.attrs.find(name);
    require(found != node_.attrs.end(), "attribute " + name + " is missing");
    return found->second;
  }
  double attr(const std::string& name, double fallback) const {
    return node_.attrs.count(name) > 0 ? attr(name) : fallback;
  }
  int64_t whole(const std::string& name, int64_t most) const {
    const double value = attr(name);
    require(value >= 1 && value <= static_cast<double>(most) && value == static_cast<double>(static_cast<int64_t>(value)),
            name + " must be a whole number from 1 to " + text(most));
    return static_cast<int64_t>(value);
  }
  size_t num_weights() const { return node_.weights.size(); }
  const std::string& weight_name(size_t i) const { return node_.weights[i]; }

 private:
  const ProgramSpec& spec_;
  const NodeSpec& node_;
  size_t index_;
  const std::map<int64_t, int>& buffer_index_;
};

class Compiler {
 public:
  Compiler(const ProgramSpec& spec, const KVSpec& kv) : spec_(spec), kv_(kv) {}

  Compiled run() {
    check_geometry();
    for (const BufferSpec& buffer : spec_.buffers) {
      if (buffer.width < 1) throw std::invalid_argument("buffer " + text(buffer.id) + " has no width");
      if (buffer.width > kMaxWidth) throw std::invalid_argument("buffer " + text(buffer.id) + " is too wide");
      if (!index_.emplace(buffer.id, static_cast<int>(index_.size())).second) {
        throw std::invalid_argument("buffer " + text(buffer.id) + " is declared twice");
      }
    }
    out_.num_positions = std::numeric_limits<int32_t>::max();
    out_.group_windows.assign(1, kNoLayer);
    for (size_t i = 0; i < spec_.nodes.size(); ++i) add_node(NodeReader(spec_, i, index_));
    for (int32_t& window : out_.group_windows) window = window == kNoLayer ? 0 : window;
    fuse_gated();
    return std::move(out_);
  }

 private:
  void check_geometry() const {
    const auto require = [](bool holds, const std::string& why) {
      if (!holds) throw std::invalid_argument(why);
    };
    require(kv_.block_size == 16 || kv_.block_size == 32 || kv_.block_size == 64,
            "block_size must be 16, 32 or 64, got " + text(kv_.block_size));
    require(kv_.num_layers > 0 && kv_.num_blocks > 0 && kv_.num_kv_heads > 0, "the cache has no layers, blocks or heads");
    require(kv_.num_blocks < std::numeric_limits<int32_t>::max(), "too many blocks");
    require(kv_.num_layers <= kMaxLayers && kv_.num_kv_heads <= kMaxLayers, "too many layers or heads");
    require(kv_.head_dim % 16 == 0 && kv_.head_dim >= 16 && kv_.head_dim <= kMaxHeadDim,
            "head_dim must be a multiple of 16 up to " + text(kMaxHeadDim) + ", got " + text(kv_.head_dim));
    require(kv_.head_dim == spec_.head_dim && kv_.num_kv_heads == spec_.num_kv_heads,
            "the cache's heads are not the program's");
    require(spec_.num_heads > 0 && spec_.num_heads % spec_.num_kv_heads == 0,
            "num_heads must be a multiple of num_kv_heads, got " + text(spec_.num_heads) + " and " + text(spec_.num_kv_heads));
    require(spec_.num_heads / spec_.num_kv_heads <= kMaxQueries,
            "at most " + text(kMaxQueries) + " query heads may share a KV head");
    require(spec_.vocab_size > 0 && spec_.vocab_size < std::numeric_limits<int32_t>::max(), "vocab_size is out of range");
  }

  void add_node(const NodeReader& node) {
    switch (node.verb()) {
      case Verb::embed: return embed(node);
      case Verb::rms_norm: return norm(node, Verb::rms_norm, 1);
      case Verb::layer_norm: return norm(node, Verb::layer_norm, 2);
      case Verb::rms_norm_slices: return rms_norm_slices(node);
      case Verb::linear: return linear(node);
      case Verb::rope_write_kv: return rope_write_kv(node);
      case Verb::paged_attention: return paged_attention(node);
      case Verb::silu_mul: return gated(node, Verb::silu_mul);
      case Verb::gelu_tanh_mul: return gated(node, Verb::gelu_tanh_mul);
      case Verb::add: return add(node);
      case Verb::add_gated: return add_gated(node);
      case Verb::route: return route(node);
      case Verb::gather_routed: return gather_routed(node);
      case Verb::expert_linear: return expert_linear(node);
      case Verb::combine_routed: return combine_routed(node);
      case Verb::scale: return in_place(node, Verb::scale, "factor");
      case Verb::softcap: return in_place(node, Verb::softcap, "cap");
      case Verb::select_wanted: return select_wanted(node);
      case Verb::sample: return sample(node);
      case Verb::prepare: return;
    }
  }

  void embed(const NodeReader& node) {
    node.shape(0, true, 1, 1, {});
    Step step{Verb::embed};
    step.out = node.output();
    step.weight = &node.weight(0, true).packed.weight;
    node.rows(step.out, Rows::tokens);
    node.width(step.out, step.weight->num_inputs);
    node.require(step.weight->num_outputs == spec_.vocab_size, "weight " + node.weight_name(0) + " has " +
                 text(step.weight->num_outputs) + " outputs, the vocabulary has " + text(spec_.vocab_size));
    add_row_step(step);
  }

  void norm(const NodeReader& node, Verb verb, size_t max_weights) {
    node.shape(1, true, 1, max_weights, {"eps"});
    Step step{verb};
    step.in = node.input(0);
    step.out = node.output();
    same_rows(node, step);
    node.width(step.out, node.spec_of(step.in).width);
    step.array = node.vector(0, node.spec_of(step.in).width);
    if (node.num_weights() > 1) step.bias = node.vector(1, node.spec_of(step.in).width);
    step.eps = static_cast<float>(node.attr("eps"));
    add_row_step(step);
  }

  void rms_norm_slices(const NodeReader& node) {
    node.shape(1, true, 1, 1, {"eps", "first_column", "num_slices"});
    Step step{Verb::rms_norm_slices};
    step.in = node.input(0);
    step.out = node.output();
    node.require(step.in == step.out, "its output must be its input");
    step.width = node.weight(0, false).columns;
    step.array = node.vector(0, step.width);
    step.eps = static_cast<float>(node.attr("eps"));
    step.out_column = static_cast<int64_t>(node.attr("first_column"));
    step.count = static_cast<int64_t>(node.attr("num_slices"));
    const int64_t width = node.spec_of(step.out).width;
    node.require(step.width > 0 && step.out_column >= 0 && step.count >= 0 && step.out_column <= width &&
                     step.count <= (width - step.out_column) / step.width,
                 text(step.count) + " slices of " + text(step.width) + " from column " + text(step.out_column) +
                     " do not fit buffer " + text(node.spec_of(step.out).id));
    add_row_step(step);
  }

  void in_place(const NodeReader& node, Verb verb, const std::string& attr) {
    node.shape(1, true, 0, 0, {attr});
    Step step{verb};
    step.in = node.input(0);
    step.out = node.output();
    node.require(step.in == step.out, "its output must be its input");
    step.scale = static_cast<float>(node.attr(attr));
    node.require(step.scale > 0.0f, attr + " must be positive");
    add_row_step(step);
  }

  void linear(const NodeReader& node) {
    node.shape(1, true, 1, 2, {"out_column"});
    Step step{Verb::linear};
    step.in = node.input(0);
    step.out = node.output();
    step.weight = &node.weight(0, true).packed.weight;
    step.out_column = static_cast<int64_t>(node.attr("out_column", 0.0));
    if (node.num_weights() > 1) step.bias = node.vector(1, step.weight->num_outputs);
    same_rows(node, step);
    node.require(step.in != step.out, "reads and writes the same buffer");
    node.width(step.in, step.weight->num_inputs);
    check_columns(node, step, step.weight->num_outputs);
    if (step.weight->form != Form::f32) step.prepared = prepare(step.in, step.weight->form);
    wrote(step.out);
    add_op(Op::linear, step, "linear " + text(step.weight->num_outputs) + "x" + text(step.weight->num_inputs) + " " +
                                 form_name(step.weight->form));
  }

  void rope_write_kv(const NodeReader& node) {
    node.shape(1, true, 0, 1, {"layer", "kv_group"});
    Step step{Verb::rope_write_kv};
    step.in = node.input(0);
    step.out = node.output();
    step.layer = layer_of(node);
    step.kv_group = group_of(node);
    node.rows(step.in, Rows::tokens);
    node.rows(step.out, Rows::tokens);
    node.width(step.in, (spec_.num_heads + 2 * spec_.num_kv_heads) * spec_.head_dim);
    node.width(step.out, spec_.num_heads * spec_.head_dim);
    if (node.num_weights() > 0) {    // without a table nothing is rotated
      const WeightSpec& rope = node.weight(0, false);
      node.require(rope.columns > 0 && rope.columns % 2 == 0 && rope.columns <= spec_.head_dim,
                   "weight " + node.weight_name(0) + " must have an even number of columns up to head_dim");
      step.array = rope.values.data();
      step.width = rope.columns;
      if (rope.rows < out_.num_positions) out_.num_positions = rope.rows;
    }
    add_row_step(step);
  }

  void paged_attention(const NodeReader& node) {
    node.shape(1, true, 0, 0, {"layer", "kv_group", "window", "scale", "softcap"});
    Step step{Verb::paged_attention};
    step.in = node.input(0);
    step.out = node.output();
    step.layer = layer_of(node);
    step.kv_group = group_of(node);
    step.plan = plan_of(node, step.kv_group);
    step.scale = static_cast<float>(node.attr("scale"));
    step.softcap = static_cast<float>(node.attr("softcap", 0.0));
    node.require(step.softcap >= 0.0f, "softcap must not be negative");
    node.require(step.in != step.out, "reads and writes the same buffer");
    for (const int buffer : {step.in, step.out}) {
      node.rows(buffer, Rows::tokens);
      node.width(buffer, spec_.num_heads * spec_.head_dim);
    }
    wrote(step.out);
    add_op(Op::attend, step, "paged_attention");
    add_op(Op::merge, step, "paged_attention merge");
  }

  void gated(const NodeReader& node, Verb verb) {
    node.shape(1, true, 0, 0, {});
    Step step{verb};
    step.in = node.input(0);
    step.out = node.output();
    same_rows(node, step);
    node.require(step.in != step.out, "reads and writes the same buffer");
    node.width(step.in, 2 * node.spec_of(step.out).width);
    add_row_step(step);
  }

  void add(const NodeReader& node) {
    node.shape(2, true, 0, 0, {"scale"});
    Step step{Verb::add};
    step.scale = static_cast<float>(node.attr("scale", 1.0));
    step.in = node.input(0);
    step.in2 = node.input(1);
    step.out = node.output();
    node.require(step.in == step.out, "its output must be its first input");
    node.rows(step.in2, node.spec_of(step.in).rows);
    node.width(step.in2, node.spec_of(step.in).width);
    add_row_step(step);
  }

  void add_gated(const NodeReader& node) {
    node.shape(3, true, 0, 0, {});
    Step step{Verb::add_gated};
    step.in = node.input(0);
    step.in2 = node.input(1);
    step.in3 = node.input(2);
    step.out = node.output();
    node.require(step.in == step.out, "its output must be its first input");
    for (const int buffer : {step.in2, step.in3}) node.rows(buffer, node.spec_of(step.in).rows);
    node.width(step.in2, node.spec_of(step.in).width);
    node.width(step.in3, 1);
    add_row_step(step);
  }

  void route(const NodeReader& node) {
    node.shape(1, true, 0, 0, {"top_k", "renormalise"});
    Step step{Verb::route};
    step.in = node.input(0);
    step.out = node.output();
    step.width = node.spec_of(step.in).width;
    node.require(step.width <= kMaxExperts, "at most " + text(kMaxExperts) + " experts, got " + text(step.width));
    step.count = node.whole("top_k", step.width);
    step.renormalises = node.attr("renormalise") != 0.0;
    node.require(step.in != step.out, "reads and writes the same buffer");
    for (const int buffer : {step.in, step.out}) node.rows(buffer, Rows::tokens);
    node.width(step.out, 2 * step.count);
    node.require(out_.experts_per_token == 0 || out_.experts_per_token == step.count,
                 "top_k must be the same for every route of a program");
    out_.experts_per_token = step.count;
    out_.most_experts = std::max(out_.most_experts, step.width);
    add_row_step(step);
    add_op(Op::sort, step, "route sort");
    routes_ = step.out;
    sort_ = out_.ops.size() - 1;
  }

  void gather_routed(const NodeReader& node) {
    node.shape(2, true, 0, 0, {});
    Step step{Verb::gather_routed};
    read_routes(node, step);
    step.out = node.output();
    node.rows(step.in, Rows::tokens);
    node.rows(step.out, Rows::routed);
    node.width(step.out, node.spec_of(step.in).width);
    add_row_step(step);
  }

  void combine_routed(const NodeReader& node) {
    node.shape(2, true, 0, 0, {});
    Step step{Verb::combine_routed};
    read_routes(node, step);
    step.out = node.output();
    node.rows(step.in, Rows::routed);
    node.rows(step.out, Rows::tokens);
    node.width(step.out, node.spec_of(step.in).width);
    step.count = out_.experts_per_token;
    add_row_step(step);
  }

  void expert_linear(const NodeReader& node) {
    node.shape(2, true, 1, static_cast<size_t>(kMaxExperts), {"out_column"});
    Step step{Verb::expert_linear};
    read_routes(node, step);
    step.out = node.output();
    const int64_t num_experts = out_.ops[sort_].steps[0].width;
    node.require(static_cast<int64_t>(node.num_weights()) == num_experts,
                 "needs a weight for each of the " + text(num_experts) + " experts, got " +
                     text(static_cast<int64_t>(node.num_weights())));
    for (size_t i = 0; i < node.num_weights(); ++i) step.experts.push_back(&node.weight(i, true).packed.weight);
    const Weight& first = *step.experts[0];
    for (size_t i = 0; i < node.num_weights(); ++i) {
      const Weight& weight = *step.experts[i];
      node.require(weight.form == first.form && weight.num_outputs == first.num_outputs && weight.num_inputs == first.num_inputs,
                   "weight " + node.weight_name(i) + " differs in form or shape from " + node.weight_name(0));
    }
    step.out_column = static_cast<int64_t>(node.attr("out_column", 0.0));
    for (const int buffer : {step.in, step.out}) node.rows(buffer, Rows::routed);
    node.require(step.in != step.out, "reads and writes the same buffer");
    node.width(step.in, first.num_inputs);
    check_columns(node, step, first.num_outputs);
    if (first.form != Form::f32) step.prepared = prepare(step.in, first.form);
    wrote(step.out);
    add_op(Op::expert_linear, step, "expert_linear " + text(first.num_outputs) + "x" + text(first.num_inputs) + " " +
                                        form_name(first.form) + " of " + text(num_experts));
    std::vector<int>& linears = out_.ops[sort_].linears;
    out_.ops.back().index = static_cast<int>(linears.size());
    linears.push_back(static_cast<int>(out_.ops.size()) - 1);
  }

  // Inputs x and routes; the routes must be those that the rows are sorted by now.
  void read_routes(const NodeReader& node, Step& step) const {
    step.in = node.input(0);
    step.in2 = node.input(1);
    node.require(step.in2 == routes_, "buffer " + text(node.spec_of(step.in2).id) + " does not hold the last routes");
  }

  void select_wanted(const NodeReader& node) {
    node.shape(1, true, 0, 0, {});
    Step step{Verb::select_wanted};
    step.in = node.input(0);
    step.out = node.output();
    node.rows(step.in, Rows::tokens);
    node.rows(step.out, Rows::wanted);
    node.width(step.out, node.spec_of(step.in).width);
    add_row_step(step);
  }

  void sample(const NodeReader& node) {
    node.shape(1, false, 0, 0, {});
    Step step{Verb::sample};
    step.in = node.input(0);
    node.rows(step.in, Rows::wanted);
    node.width(step.in, spec_.vocab_size);
    node.require(!has_sample_, "a program samples once");
    has_sample_ = true;
    add_op(Op::sample, step, "sample");
  }

  static void same_rows(const NodeReader& node, const Step& step) { node.rows(step.out, node.spec_of(step.in).rows); }

  static void check_columns(const NodeReader& node, const Step& step, int64_t num_outputs) {
    node.require(step.out_column >= 0 && step.out_column + num_outputs <= node.spec_of(step.out).width,
                 "columns " + text(step.out_column) + " to " + text(step.out_column + num_outputs) + " do not fit buffer " +
                     text(node.spec_of(step.out).id));
  }

  int32_t layer_of(const NodeReader& node) const {
    const double layer = node.attr("layer");
    node.require(layer >= 0 && layer < static_cast<double>(kv_.num_layers) && layer == static_cast<int32_t>(layer),
                 "layer is not one of the cache's " + text(kv_.num_layers));
    return static_cast<int32_t>(layer);
  }

  // Block tables come group by group, so every group up to the last one named counts.
  int32_t group_of(const NodeReader& node) {
    const double group = node.attr("kv_group", 0.0);
    node.require(group >= 0 && group < static_cast<double>(kMaxLayers) && group == static_cast<int32_t>(group),
                 "kv_group must be a whole number below " + text(kMaxLayers));
    const size_t index = static_cast<size_t>(group);
    if (index >= out_.group_windows.size()) out_.group_windows.resize(index + 1, kNoLayer);
    return static_cast<int32_t>(group);
  }

  // The plan of attention that the node's window goes by.
  int plan_of(const NodeReader& node, int32_t group) {
    const double given = node.attr("window", 0.0);
    node.require(given >= 0 && given <= std::numeric_limits<int32_t>::max() / 2 && given == static_cast<int32_t>(given),
                 "window must be a whole number of tokens, 0 for none");
    const int32_t window = static_cast<int32_t>(given);
    int32_t& widest = out_.group_windows[static_cast<size_t>(group)];
    if (widest == kNoLayer || window == 0 || (widest > 0 && window > widest)) widest = window;
    for (size_t i = 0; i < out_.windows.size(); ++i) {
      if (out_.windows[i] == window) return static_cast<int>(i);
    }
    out_.windows.push_back(window);
    return static_cast<int>(out_.windows.size()) - 1;
  }

  // The buffer in a linear's form; made once and valid until the buffer is written again.
  int prepare(int buffer, Form form) {
    const std::pair<int, Form> key{buffer, form};
    const auto found = prepared_.find(key);
    const int prepared = found != prepared_.end() ? found->second : static_cast<int>(out_.prepared.size());
    if (found == prepared_.end()) {
      prepared_[key] = prepared;
      out_.prepared.push_back({buffer, form});
    }
    if (valid_.insert(key).second) {
      Step step{Verb::prepare};
      step.in = buffer;
      step.prepared = prepared;
      append_row_step(step, rows_of(buffer), "prepare");
    }
    return prepared;
  }

  void wrote(int buffer) {
    if (buffer == routes_) routes_ = -1;
    for (auto key = valid_.begin(); key != valid_.end();) key = key->first == buffer ? valid_.erase(key) : ++key;
  }

  Rows rows_of(int buffer) const { return spec_.buffers[static_cast<size_t>(buffer)].rows; }

  void add_row_step(const Step& step) {
    wrote(step.out);
    std::string name;
    for (const auto& entry : verbs()) {
      if (entry.second == step.verb) name = entry.first;
    }
    append_row_step(step, rows_of(step.out), name);
  }

  void append_row_step(const Step& step, Rows of, const std::string& name) {
    const bool chains = !out_.ops.empty() && out_.ops.back().kind == Op::rows && out_.ops.back().of == of;
    if (!chains) out_.ops.push_back({Op::rows, of, {}, ""});
    Op& op = out_.ops.back();
    op.label += (op.label.empty() ? "" : " + ") + name;
    op.steps.push_back(step);
  }

  void add_op(Op::Kind kind, const Step& step, const std::string& label) {
    const Rows of = kind == Op::sample ? Rows::wanted : kind == Op::linear ? rows_of(step.out) : Rows::tokens;
    out_.ops.push_back({kind, of, {step}, label});
  }

  // Linear, activation and rounding become one operation where nobody else reads what the first two write.
  void fuse_gated() {
    std::map<int, int> reads, fused_reads;    // by buffer
    for (const Op& op : out_.ops) {
      for (const Step& step : op.steps) count_reads(step, reads);
    }
    for (size_t i = 0; i + 1 < out_.ops.size(); ++i) {
      if (!is_gated(out_.ops[i], out_.ops[i + 1])) continue;
      for (const Step& step : out_.ops[i + 1].steps) ++fused_reads[step.in];
    }
    std::vector<Op> ops;
    std::vector<int> place;    // of each operation as it was, among `ops`
    for (size_t i = 0; i < out_.ops.size(); ++i) {
      place.push_back(static_cast<int>(ops.size()));
      Op op = std::move(out_.ops[i]);
      if (i + 1 < out_.ops.size() && is_gated(op, out_.ops[i + 1])) {
        const Op& next = out_.ops[i + 1];
        const auto is_private = [&](const Step& step) { return reads[step.in] == fused_reads[step.in]; };
        if (std::all_of(next.steps.begin(), next.steps.end(), is_private)) {
          op.kind = Op::gated;
          op.label += " + " + next.label;
          op.steps.insert(op.steps.end(), next.steps.begin(), next.steps.end());
          place.push_back(place.back());
          ++i;
        }
      }
      ops.push_back(std::move(op));
    }
    for (Op& op : ops) {
      for (int& linear : op.linears) linear = place[static_cast<size_t>(linear)];
    }
    out_.ops = std::move(ops);
  }

  bool is_gated(const Op& op, const Op& next) const {
    if (op.kind != Op::linear || next.kind != Op::rows || next.of != op.of || next.steps.size() != 2) return false;
    const Step &linear = op.steps[0], &activation = next.steps[0], &rounding = next.steps[1];
    if (activation.verb != Verb::silu_mul && activation.verb != Verb::gelu_tanh_mul) return false;
    const int64_t inner = spec_.buffers[static_cast<size_t>(activation.out)].width;
    return linear.weight->form != Form::f32 && linear.weight->num_outputs == 2 * inner && linear.out_column == 0 &&
           inner % kGroup == 0 && activation.in == linear.out && rounding.verb == Verb::prepare &&
           rounding.in == activation.out;
  }

  // A linear reads the prepared rows where it has any; verbs that work in place read what they write.
  static void count_reads(const Step& step, std::map<int, int>& reads) {
    const bool is_linear = step.verb == Verb::linear || step.verb == Verb::expert_linear;
    if (step.in >= 0 && !(is_linear && step.prepared >= 0)) ++reads[step.in];
    for (const int buffer : {step.in2, step.in3}) {
      if (buffer >= 0) ++reads[buffer];
    }
    for (const Verb verb : {Verb::add, Verb::add_gated, Verb::scale, Verb::softcap, Verb::rms_norm_slices}) {
      if (step.verb == verb && step.in != step.out) ++reads[step.out];
    }
  }

  const ProgramSpec& spec_;
  const KVSpec& kv_;
  std::map<int64_t, int> index_;
  std::map<std::pair<int, Form>, int> prepared_;
  std::set<std::pair<int, Form>> valid_;
  bool has_sample_ = false;
  int routes_ = -1;      // the buffer of the last routes, while it holds them
  size_t sort_ = 0;      // and the operation that sorts by them
  Compiled out_;
};

}  // namespace

Compiled compile(const ProgramSpec& spec, const KVSpec& kv) { return Compiler(spec, kv).run(); }

}  // namespace paceline
