// The runner's part in mixture of experts: which rows each expert gets, and how threads share its weights. Nobody knows
// before the router has run, inside the step, so that the tiles of these linears are set by the operation that sorts the
// rows; it has one tile, and the operations after it open when it is done.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "runner.h"

namespace paceline {

// The step's tables, reserved where running out of memory still changes nothing. The tiles of a linear are bounded here too:
// run() has no way to refuse.
void Runner::reserve_routes() {
  if (compiled_.experts_per_token == 0) return;
  const int64_t routed = num_rows(Rows::routed);
  if (routed > int64_t{1} << 24) throw std::invalid_argument("too many tokens in a step");
  row_of_choice_.resize(static_cast<size_t>(routed));
  token_of_row_.resize(static_cast<size_t>(routed));
  expert_start_.resize(static_cast<size_t>(compiled_.most_experts) + 1);
  for (ExpertTiles& tiles : expert_tiles_) {
    tiles.tilings.resize(static_cast<size_t>(compiled_.most_experts));
    tiles.first_tile.resize(static_cast<size_t>(compiled_.most_experts) + 1);
  }
  for (const Op& op : compiled_.ops) {
    if (op.kind != Op::expert_linear) continue;
    // Each expert's rows are cut into tiles of kRowTile and a rest, its outputs into strips at the finest.
    const int64_t row_tiles = std::min<int64_t>(routed, static_cast<int64_t>(op.steps[0].experts.size())) + routed / kRowTile;
    if (row_tiles * op.steps[0].experts[0]->num_strips > Pool::kMaxTiles) {
      throw std::invalid_argument("too many tokens in a step");
    }
  }
}

// A counting sort of the choices by expert; tokens keep their order.
void Runner::sort_routes(const Op& op) {
  const Step& route = op.steps[0];
  const int64_t k = route.count;
  const float* routes = buffer(route.out);
  const auto expert_of = [&](int64_t token, int64_t rank) { return static_cast<size_t>(routes[token * 2 * k + rank]); };
  const size_t num_experts = static_cast<size_t>(route.width);
  std::fill(expert_start_.begin(), expert_start_.end(), 0);
  for (int64_t token = 0; token < batch_.num_tokens; ++token) {
    for (int64_t rank = 0; rank < k; ++rank) ++expert_start_[expert_of(token, rank)];
  }
  int32_t end = 0;
  for (size_t expert = 0; expert < num_experts; ++expert) {    // counts become ends
    end += expert_start_[expert];
    expert_start_[expert] = end;
  }
  expert_start_[num_experts] = end;
  for (int64_t token = batch_.num_tokens; token-- > 0;) {      // and, filled from behind, starts
    for (int64_t rank = 0; rank < k; ++rank) {
      const int32_t row = --expert_start_[expert_of(token, rank)];
      row_of_choice_[static_cast<size_t>(token * k + rank)] = row;
      token_of_row_[static_cast<size_t>(row)] = static_cast<int32_t>(token);
    }
  }
  for (const int linear : op.linears) tile_expert_linear(linear);
}

// Experts with few rows share the tiles that a linear would have had; each tile reads weights of one expert.
void Runner::tile_expert_linear(int op) {
  const Op& linear = compiled_.ops[static_cast<size_t>(op)];
  const std::vector<const Weight*>& experts = linear.steps[0].experts;
  ExpertTiles& tiles = expert_tiles_[static_cast<size_t>(linear.index)];
  int64_t num_used = 0;
  for (size_t expert = 0; expert < experts.size(); ++expert) num_used += expert_start_[expert] < expert_start_[expert + 1];
  const int64_t num_tiles = ceil_div(pool_->num_threads() * kTilesPerThread, std::max<int64_t>(num_used, 1));
  int64_t total = 0;
  for (size_t expert = 0; expert < experts.size(); ++expert) {
    tiles.first_tile[expert] = static_cast<int>(total);
    const int64_t num_rows = expert_start_[expert + 1] - expert_start_[expert];
    if (num_rows == 0) continue;
    Tiling& tiling = tiles.tilings[expert];
    tiling = tile_linear(*experts[expert], num_rows, num_tiles);
    total += tiling.total;
  }
  tiles.first_tile[experts.size()] = static_cast<int>(total);
  totals_[static_cast<size_t>(op)].store(static_cast<int>(total), std::memory_order_relaxed);
}

void Runner::run_expert_linear(const Op& op, int tile) {
  const Step& step = op.steps[0];
  const ExpertTiles& tiles = expert_tiles_[static_cast<size_t>(op.index)];
  // An expert without rows begins where the next one does: the last that begins at or before the tile is the tile's.
  const auto end = tiles.first_tile.begin() + static_cast<int64_t>(step.experts.size()) + 1;
  const size_t expert = static_cast<size_t>(std::upper_bound(tiles.first_tile.begin(), end, tile) - tiles.first_tile.begin()) - 1;
  run_linear(step, *step.experts[expert], tiles.tilings[expert], tile - tiles.first_tile[expert], expert_start_[expert],
             expert_start_[expert + 1]);
}

void Runner::gather_routed(const Step& step, int64_t first, int64_t last) {
  const int64_t row_width = width(step.in);
  for (int64_t row = first; row < last; ++row) {
    std::memcpy(buffer(step.out) + row * row_width, buffer(step.in) + token_of_row_[static_cast<size_t>(row)] * row_width,
                static_cast<size_t>(row_width) * sizeof(float));
  }
}

}  // namespace paceline
