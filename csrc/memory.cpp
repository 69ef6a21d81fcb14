#include "memory.h"

#include <cstdlib>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace paceline {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kChunk = size_t{32} << 20;

struct Chunk {
  explicit Chunk(size_t wanted) : size((wanted + kHugePage - 1) / kHugePage * kHugePage) {
    data = static_cast<uint8_t*>(std::aligned_alloc(kHugePage, size));
    if (data == nullptr) throw std::bad_alloc();
#if defined(__linux__)
    madvise(data, size, MADV_HUGEPAGE);    // advice only: a system without huge pages works as well
#endif
  }
  ~Chunk() { std::free(data); }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  size_t size;
  size_t used = 0;
  uint8_t* data;
};

std::mutex chunk_mutex;
std::weak_ptr<Chunk> open_chunk;    // weak: freeing every weight frees the last chunk too

}  // namespace

std::shared_ptr<void> allocate_weight_memory(size_t num_bytes, uint8_t** data) {
  num_bytes = (num_bytes + 63) / 64 * 64;
  if (num_bytes >= kChunk / 2) {
    auto own = std::make_shared<Chunk>(num_bytes);
    *data = own->data;
    return own;
  }
  const std::lock_guard<std::mutex> lock(chunk_mutex);
  std::shared_ptr<Chunk> chunk = open_chunk.lock();
  if (!chunk || chunk->size - chunk->used < num_bytes) {
    chunk = std::make_shared<Chunk>(kChunk);
    open_chunk = chunk;
  }
  *data = chunk->data + chunk->used;
  chunk->used += num_bytes;
  return chunk;
}

}  // namespace paceline
