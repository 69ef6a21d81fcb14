// Python's view of the step runner, and of sampling by itself for tests.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "bind_arrays.h"
#include "cpu_features.h"
#include "runner.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

template <class T> constexpr const char* type_name();
template <> constexpr const char* type_name<float>() { return "float32"; }
template <> constexpr const char* type_name<int32_t>() { return "int32"; }
template <> constexpr const char* type_name<uint32_t>() { return "uint32"; }
template <> constexpr const char* type_name<uint64_t>() { return "uint64"; }
template <> constexpr const char* type_name<uint8_t>() { return "uint8"; }

template <class T, int N> In<T, N> array_of(const char* name, nb::handle given) {
  In<T, N> array;
  if (!nb::try_cast(given, array, false)) {
    refuse(std::string(name) + ": needs a C-contiguous array of " + type_name<T>() + " with " + std::to_string(N) +
           (N == 1 ? " dimension" : " dimensions"));
  }
  return array;
}
template <class T> In<T, 1> vector_of(const char* name, nb::handle given, size_t size) {
  In<T, 1> array = array_of<T, 1>(name, given);
  if (array.shape(0) != size) {
    refuse(std::string(name) + ": has " + std::to_string(array.shape(0)) + " entries, needs " + std::to_string(size));
  }
  return array;
}

// --- the program ---

using BufferTuple = std::tuple<int64_t, std::string, int64_t>;
using NodeTuple = std::tuple<std::string, std::vector<int64_t>, int64_t, std::vector<std::string>, std::map<std::string, double>>;

WeightSpec weight_spec(const std::string& name, nb::handle given) {
  WeightSpec spec;
  if (nb::isinstance<PackedWeight>(given)) {
    spec.is_packed = true;
    spec.packed = nb::cast<PackedWeight>(given);
    return spec;
  }
  nb::ndarray<const float, nb::c_contig, nb::device::cpu> array;
  if (!nb::try_cast(given, array, false) || array.ndim() < 1 || array.ndim() > 2) {
    refuse("weight " + name + " must be a PackedWeight or a C-contiguous float32 array of 1 or 2 dimensions");
  }
  spec.rows = array.ndim() == 1 ? 1 : static_cast<int64_t>(array.shape(0));
  spec.columns = static_cast<int64_t>(array.shape(array.ndim() - 1));
  spec.values.assign(array.data(), array.data() + spec.rows * spec.columns);
  return spec;
}

int64_t whole_number(nb::dict given, const char* key) {
  if (!given.contains(key)) refuse(std::string("kv: ") + key + " is missing");
  int64_t value;
  if (!nb::try_cast(nb::handle(given[key]), value)) refuse(std::string("kv: ") + key + " must be a whole number");
  return value;
}

KVSpec kv_spec(nb::dict given) {
  static const char* const names[] = {"num_layers", "num_kv_heads", "head_dim", "block_size", "num_blocks", "dtype",
                                      "pages"};
  for (auto item : given) {
    const std::string name = nb::cast<std::string>(item.first);
    bool is_known = false;
    for (const char* known : names) is_known = is_known || name == known;
    if (!is_known) refuse("kv: unknown entry " + name);
  }
  KVSpec spec{whole_number(given, "num_layers"), whole_number(given, "num_kv_heads"), whole_number(given, "head_dim"),
              whole_number(given, "block_size"), whole_number(given, "num_blocks"), false};
  std::string dtype;
  if (!given.contains("dtype") || !nb::try_cast(nb::handle(given["dtype"]), dtype) || (dtype != "bf16" && dtype != "f32")) {
    refuse("kv: dtype must be bf16 or f32");
  }
  spec.is_bf16 = dtype == "bf16";
  if (given.contains("pages")) {
    std::string pages;
    if (!nb::try_cast(nb::handle(given["pages"]), pages) || (pages != "early" && pages != "late")) {
      refuse("kv: pages must be early or late");
    }
    spec.has_early_pages = pages == "early";
  }
  return spec;
}

void make_runner(Runner* self, const std::string& path, int num_threads, const std::vector<BufferTuple>& buffers,
                 const std::vector<NodeTuple>& nodes, nb::dict weights, int64_t num_heads, int64_t num_kv_heads,
                 int64_t head_dim, int64_t vocab_size, nb::dict kv, bool runs_ahead) {
  ProgramSpec spec;
  for (const auto& [id, rows, width] : buffers) {
    static const std::map<std::string, Rows> known = {
        {"tokens", Rows::tokens}, {"wanted", Rows::wanted}, {"routed", Rows::routed}};
    const auto found = known.find(rows);
    if (found == known.end()) {
      refuse("buffer " + std::to_string(id) + ": rows must be tokens, wanted or routed, got " + rows);
    }
    spec.buffers.push_back({id, found->second, width});
  }
  for (const auto& [verb, inputs, output, names, attrs] : nodes) spec.nodes.push_back({verb, inputs, output, names, attrs});
  for (auto item : weights) {
    const std::string name = nb::cast<std::string>(item.first);
    spec.weights[name] = weight_spec(name, item.second);
  }
  spec.num_heads = num_heads;
  spec.num_kv_heads = num_kv_heads;
  spec.head_dim = head_dim;
  spec.vocab_size = vocab_size;
  const KVSpec cache = kv_spec(kv);
  const KernelTable& table = find_table(path);
  nb::gil_scoped_release unlocked;
  new (self) Runner(table, num_threads, std::move(spec), cache, runs_ahead);
}

// --- a step ---

// The arrays of SamplingBatch; the pointers are good while this lives.
struct SamplingArrays {
  SamplingArrays(size_t size, nb::handle temperature, nb::handle top_k, nb::handle top_p, nb::handle seed,
                 nb::handle prompt_index, nb::handle choice_index, nb::handle position, nb::handle wants_logprob)
      : temperature(vector_of<float>("temperature", temperature, size)), top_k(vector_of<int32_t>("top_k", top_k, size)),
        top_p(vector_of<float>("top_p", top_p, size)), seed(vector_of<uint64_t>("seed", seed, size)),
        prompt_index(vector_of<uint32_t>("prompt_index", prompt_index, size)),
        choice_index(vector_of<uint32_t>("choice_index", choice_index, size)),
        position(vector_of<uint64_t>("position", position, size)),
        wants_logprob(vector_of<uint8_t>("wants_logprob", wants_logprob, size)) {}

  Sampling view() const {
    return {temperature.data(), top_k.data(), top_p.data(), seed.data(), prompt_index.data(), choice_index.data(),
            position.data(), wants_logprob.data()};
  }

  In<float, 1> temperature;
  In<int32_t, 1> top_k;
  In<float, 1> top_p;
  In<uint64_t, 1> seed;
  In<uint32_t, 1> prompt_index, choice_index;
  In<uint64_t, 1> position;
  In<uint8_t, 1> wants_logprob;
};

// A list of lists of token ids: an object with the arrays `starts` and `values`.
struct RaggedArrays {
  RaggedArrays(const char* name, nb::handle given, size_t size)
      : starts(vector_of<int32_t>((std::string(name) + ".starts").c_str(), nb::getattr(given, "starts"), size + 1)),
        values(array_of<int32_t, 1>((std::string(name) + ".values").c_str(), nb::getattr(given, "values"))) {
    if (starts.data()[size] != static_cast<int32_t>(values.shape(0))) refuse(std::string(name) + ": starts must end at the last value");
  }
  Ragged view() const { return {starts.data(), values.data()}; }

  In<int32_t, 1> starts, values;
};

// A SamplingExtras of Python, or None; what it gives and takes is good while this lives.
class Extras {
 public:
  Extras(nb::handle given, size_t num_wanted) {
    if (given.is_none()) return;
    const size_t size = array_of<int32_t, 1>("rows", nb::getattr(given, "rows")).shape(0);
    view_.count = static_cast<int64_t>(size);
    view_.rows = ints(given, "rows", size);
    view_.min_p = floats(given, "min_p", size);
    view_.typical_p = floats(given, "typical_p", size);
    view_.repetition_penalty = floats(given, "repetition_penalty", size);
    view_.presence_penalty = floats(given, "presence_penalty", size);
    view_.frequency_penalty = floats(given, "frequency_penalty", size);
    view_.num_prompt = ints(given, "num_prompt", size);
    view_.num_top = ints(given, "num_top", size);
    view_.target = ints(given, "target", size);
    for (const char* name : {"history", "allowed", "banned", "biased"}) lists_.emplace_back(name, nb::getattr(given, name), size);
    view_.history = lists_[0].view();
    view_.allowed = lists_[1].view();
    view_.banned = lists_[2].view();
    view_.biased = lists_[3].view();
    view_.bias = floats(given, "bias", lists_[3].values.shape(0));
    int32_t width = 0;
    for (size_t i = 0; i < size; ++i) width = view_.num_top[i] > width ? view_.num_top[i] : width;
    view_.top_width = width;
    entry_of_.assign(num_wanted, -1);
    for (size_t i = 0; i < size; ++i) {
      const int32_t row = view_.rows[i];
      if (row >= 0 && static_cast<size_t>(row) < num_wanted) entry_of_[static_cast<size_t>(row)] = static_cast<int32_t>(i);
    }
    Out<int32_t> ids = make_array<int32_t>({size, static_cast<size_t>(width)});
    Out<float> logprobs = make_array<float>({size, static_cast<size_t>(width)});
    view_.top_ids = ids.data();
    view_.top_logprobs = logprobs.data();
    std::fill_n(ids.data(), size * static_cast<size_t>(width), -1);
    std::fill_n(logprobs.data(), size * static_cast<size_t>(width), 0.0f);
    top_ids = nb::cast(ids);
    top_logprobs = nb::cast(logprobs);
  }
  Extras(const Extras&) = delete;

  Sampling added_to(Sampling sampling) const {
    if (entry_of_.empty()) return sampling;
    sampling.extras = &view_;
    sampling.entry_of = entry_of_.data();
    return sampling;
  }
  const SamplingExtras* view() const { return entry_of_.empty() ? nullptr : &view_; }

  nb::object top_ids = nb::none(), top_logprobs = nb::none();

 private:
  const int32_t* ints(nb::handle given, const char* name, size_t size) {
    ints_.push_back(vector_of<int32_t>(name, nb::getattr(given, name), size));
    return ints_.back().data();
  }
  const float* floats(nb::handle given, const char* name, size_t size) {
    floats_.push_back(vector_of<float>(name, nb::getattr(given, name), size));
    return floats_.back().data();
  }

  SamplingExtras view_{};
  std::vector<In<int32_t, 1>> ints_;
  std::vector<In<float, 1>> floats_;
  std::vector<RaggedArrays> lists_;
  std::vector<int32_t> entry_of_;
};

nb::tuple step(Runner& self, nb::handle token_ids, nb::handle positions, nb::handle row_starts, nb::handle block_tables,
               nb::handle wanted, nb::handle copies, nb::handle temperature, nb::handle top_k, nb::handle top_p,
               nb::handle seed, nb::handle prompt_index, nb::handle choice_index, nb::handle position,
               nb::handle wants_logprob, nb::handle extras_given, bool wants_logits) {
  const auto tokens = array_of<int32_t, 1>("token_ids", token_ids);
  const auto at = vector_of<int32_t>("positions", positions, tokens.shape(0));
  const auto starts = array_of<int32_t, 1>("row_starts", row_starts);
  const auto tables = array_of<int32_t, 3>("block_tables", block_tables);
  const auto want = array_of<int32_t, 1>("wanted", wanted);
  const auto copy = array_of<int32_t, 2>("copies", copies);
  if (starts.shape(0) == 0) refuse("row_starts: needs one entry more than there are rows");
  if (tables.shape(1) != starts.shape(0) - 1) refuse("block_tables: needs, for each group, one row for every row of the step");
  if (copy.shape(1) != 2) refuse("copies: needs pairs of block ids");
  const size_t num_wanted = want.shape(0);
  const SamplingArrays sampling(num_wanted, temperature, top_k, top_p, seed, prompt_index, choice_index, position,
                                wants_logprob);
  const Extras extras(extras_given, num_wanted);

  StepInput in{};
  in.num_tokens = static_cast<int64_t>(tokens.shape(0));
  in.num_rows = static_cast<int64_t>(starts.shape(0)) - 1;
  in.num_wanted = static_cast<int64_t>(num_wanted);
  in.num_copies = static_cast<int64_t>(copy.shape(0));
  in.num_groups = static_cast<int64_t>(tables.shape(0));
  in.max_blocks = static_cast<int64_t>(tables.shape(2));
  in.token_ids = tokens.data();
  in.positions = at.data();
  in.row_starts = starts.data();
  in.block_tables = tables.data();
  in.wanted = want.data();
  in.copies = copy.data();
  in.sampling = extras.added_to(sampling.view());

  Out<int32_t> ids = make_array<int32_t>({num_wanted});
  Out<float> logprobs = make_array<float>({num_wanted});
  nb::object logits_object = nb::none();
  float* logits = nullptr;
  if (wants_logits) {
    Out<float> made = make_array<float>({num_wanted, static_cast<size_t>(self.vocab_size())});
    logits = made.data();
    logits_object = nb::cast(made);
  }
  int32_t* const ids_data = ids.data();
  float* const logprobs_data = logprobs.data();
  {
    nb::gil_scoped_release unlocked;
    self.step(in, ids_data, logprobs_data, logits);
  }
  return nb::make_tuple(ids, logprobs, logits_object, extras.top_ids, extras.top_logprobs);
}

// Samples every row of logits on the calling thread.
nb::tuple sample(const std::string& path, nb::handle logits_given, nb::handle temperature, nb::handle top_k,
                 nb::handle top_p, nb::handle seed, nb::handle prompt_index, nb::handle choice_index, nb::handle position,
                 nb::handle wants_logprob, nb::handle extras_given) {
  const KernelTable& table = find_table(path);
  const auto logits = array_of<float, 2>("logits", logits_given);
  if (logits.shape(1) == 0) refuse("logits: the vocabulary is empty");
  const size_t rows = logits.shape(0);
  const int64_t vocab_size = static_cast<int64_t>(logits.shape(1));
  const SamplingArrays arrays(rows, temperature, top_k, top_p, seed, prompt_index, choice_index, position, wants_logprob);
  const Extras extras(extras_given, rows);
  if (extras.view() != nullptr) check_extras(*extras.view(), static_cast<int64_t>(rows), vocab_size);
  const Sampling sampling = extras.added_to(arrays.view());
  Out<int32_t> ids = make_array<int32_t>({rows});
  Out<float> logprobs = make_array<float>({rows});
  Memory scratch;
  scratch.reserve(table.sample_scratch_bytes(vocab_size));
  for (size_t row = 0; row < rows; ++row) {
    ids.data()[row] = table.sample(logits.data() + row * logits.shape(1), vocab_size, sampling, static_cast<int64_t>(row),
                                   logprobs.data() + row, scratch.as<void>());
  }
  return nb::make_tuple(ids, logprobs, extras.top_ids, extras.top_logprobs);
}

void poison(Runner& self, nb::handle given) {
  const auto block_ids = array_of<int32_t, 1>("block_ids", given);
  self.poison(block_ids.data(), static_cast<int64_t>(block_ids.shape(0)));
}

std::vector<std::tuple<std::string, int64_t, double>> profile_report(const Runner& self) {
  std::vector<std::tuple<std::string, int64_t, double>> lines;
  for (const ProfileLine& line : self.profile_report()) lines.emplace_back(line.label, line.calls, line.seconds);
  return lines;
}

}  // namespace
}  // namespace paceline

void bind_runner(nb::module_& m) {
  using namespace paceline;
  nb::class_<Runner>(m, "Runner", "A program bound to its weights, its cache and its threads; see paceline/ops/interface.py.")
      .def("__init__", &make_runner, "path"_a, "num_threads"_a, "buffers"_a, "nodes"_a, "weights"_a, "num_heads"_a,
           "num_kv_heads"_a, "head_dim"_a, "vocab_size"_a, "kv"_a, "runs_ahead"_a = false)
      .def("step", &step, "token_ids"_a, "positions"_a, "row_starts"_a, "block_tables"_a, "wanted"_a, "copies"_a,
           "temperature"_a, "top_k"_a, "top_p"_a, "seed"_a, "prompt_index"_a, "choice_index"_a, "position"_a,
           "wants_logprob"_a, "extras"_a = nb::none(), "wants_logits"_a = false,
           "Runs one step: (token_ids [W], logprobs [W], logits [W, V] or None, top_ids [E, K] or None, top_logprobs). ValueError, "
           "before anything has changed, for any index out of range.")
      .def("poison", &poison, "block_ids"_a, "Fills blocks with NaN, so that a test notices whoever reads them.")
      .def_prop_ro("kv_bytes", &Runner::kv_bytes)
      .def_prop_ro("num_joined", &Runner::num_joined, "Steps that were under way when they were asked for.")
      .def("close", &Runner::close, nb::call_guard<nb::gil_scoped_release>(), "Ends the threads and frees the cache.")
      .def("profile", &Runner::profile, "enable"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Starts (and clears) or stops the per-operation timers.")
      .def("profile_report", &profile_report, "(operation, calls, seconds), each from its beginning to the next one's.");
  m.def("sample", &sample, "path"_a, "logits"_a, "temperature"_a, "top_k"_a, "top_p"_a, "seed"_a, "prompt_index"_a,
        "choice_index"_a, "position"_a, "wants_logprob"_a, "extras"_a = nb::none(),
        "The sampling verb by itself: (token_ids [W], logprobs [W], top_ids [E, K] or None, top_logprobs).");
}
