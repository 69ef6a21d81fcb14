// Arrays as both binding files take and give them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <stdexcept>
#include <string>

namespace paceline {

template <class T, int N>
using In = nanobind::ndarray<const T, nanobind::ndim<N>, nanobind::c_contig, nanobind::device::cpu>;
template <class T> using Out = nanobind::ndarray<nanobind::numpy, T>;

// Becomes a ValueError.
[[noreturn]] inline void refuse(const std::string& why) { throw std::invalid_argument(why); }

template <class T> Out<T> make_array(std::initializer_list<size_t> shape) {
  size_t count = 1;
  for (size_t n : shape) count *= n;
  T* const data = new T[count > 0 ? count : 1];
  return Out<T>(data, shape, nanobind::capsule(data, [](void* p) noexcept { delete[] static_cast<T*>(p); }));
}

}  // namespace paceline
