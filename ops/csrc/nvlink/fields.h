// SPDX-License-Identifier: Apache-2.0
// Python classes for the structs of kernels' arguments.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <string>
#include <vector>

namespace nvlink {
namespace py = pybind11;

// The C++ type of a field's value in Python. An array comes as a sequence.
template <class T> struct Given {
  using type = T;
};
template <class T, size_t N> struct Given<T[N]> {
  using type = std::array<T, N>;
};

template <class T> void assign(char *at, py::handle value) {
  using Value = typename Given<T>::type;
  *reinterpret_cast<Value *>(at) = value.cast<Value>();
}

// A field of a struct. Each struct has a table of its fields and one constructor. With pybind11's own properties, two
// functions for each field, this file takes minutes to compile.
struct Field {
  const char *name;
  size_t offset;
  void (*assign)(char *at, py::handle value);
};

void set_all(char *self, const char *name, const std::vector<Field> &fields, const py::kwargs &given) {
  for (auto [key, value] : given) {
    const char *wanted = PyUnicode_AsUTF8(key.ptr());
    const auto field = std::find_if(fields.begin(), fields.end(),
                                    [&](const Field &f) { return std::strcmp(f.name, wanted) == 0; });
    if (field == fields.end())
      throw py::type_error(std::string(name) + " has no field '" + wanted + "'");
    field->assign(self + field->offset, value);
  }
}

// Makes a class that Python calls as name(field=value, ...). name(another, field=value, ...) makes a copy of `another`
// with other values.
template <class T> void expose(py::module_ &m, const char *name, std::vector<Field> fields) {
  py::class_<T>(m, name, py::module_local()) // the tests load the emulated module beside this one
      .def(py::init([=](const T *like, const py::kwargs &given) {
             T made = like ? *like : T{};
             set_all(reinterpret_cast<char *>(&made), name, fields, given);
             return made;
           }),
           py::arg() = py::none());
}

} // namespace nvlink

#define FIELD(type, name) {#name, offsetof(type, name), assign<decltype(type::name)>}
