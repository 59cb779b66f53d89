// SPDX-License-Identifier: Apache-2.0
// The kernels' arguments and launches for Python: a class per struct of kernels.h, fields by their names.
#include "kernels.h"
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <stdexcept>
#include <string>

namespace py = pybind11;
using namespace nvlink;

namespace {

void check(int error, const char *what) {
  if (error)
    throw std::runtime_error(std::string("launching the NVLink transport's kernel '") + what +
                             "' failed: " + cudaGetErrorString(cudaError_t(error)));
}

// Spins until the word that totals writes last is there. False: a failure was recorded, or the time is over.
bool wait_for_totals(Address host, int serial, Address failure, double seconds) {
  const auto *word = reinterpret_cast<const volatile int *>(host);
  const auto *code = &reinterpret_cast<const volatile Failure *>(failure)->code;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (*word != serial) {
    if (*code != 0 || std::chrono::steady_clock::now() > end)
      return false;
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  return *code == 0;
}

// A struct's field, by name. One table and two functions for each struct: pybind11's own properties, two functions for
// each field, take minutes to compile.
struct Field {
  enum Type { INT, UINT32, INT64, ADDRESS, GROUP, ROWS, FEW } type;
  const char *name;
  size_t offset;
};

constexpr Field::Type type_of(int) { return Field::INT; }
constexpr Field::Type type_of(uint32_t) { return Field::UINT32; }
constexpr Field::Type type_of(int64_t) { return Field::INT64; }
constexpr Field::Type type_of(Address) { return Field::ADDRESS; }
Field::Type type_of(const Group &) { return Field::GROUP; }
Field::Type type_of(const Rows &) { return Field::ROWS; }
Field::Type type_of(const Few &) { return Field::FEW; }

const Field &find(const std::vector<Field> &fields, const char *name) {
  for (const Field &field : fields)
    if (std::strcmp(field.name, name) == 0)
      return field;
  throw py::attribute_error(name);
}

template <class T> T &in(char *self, const Field &field) { return *reinterpret_cast<T *>(self + field.offset); }

void set(char *self, const Field &field, py::handle value) {
  switch (field.type) {
  case Field::INT: in<int>(self, field) = value.cast<int>(); break;
  case Field::UINT32: in<uint32_t>(self, field) = value.cast<uint32_t>(); break;
  case Field::INT64: in<int64_t>(self, field) = value.cast<int64_t>(); break;
  case Field::ADDRESS: in<Address>(self, field) = value.cast<Address>(); break;
  case Field::GROUP: in<Group>(self, field) = value.cast<Group>(); break;
  case Field::ROWS: in<Rows>(self, field) = value.cast<Rows>(); break;
  case Field::FEW: in<Few>(self, field) = value.cast<Few>(); break;
  }
}

py::object get(char *self, const Field &field) {
  switch (field.type) {
  case Field::INT: return py::int_(in<int>(self, field));
  case Field::UINT32: return py::int_(in<uint32_t>(self, field));
  case Field::INT64: return py::int_(in<int64_t>(self, field));
  case Field::ADDRESS: return py::int_(in<Address>(self, field));
  case Field::GROUP: return py::cast(Group(in<Group>(self, field)));
  case Field::ROWS: return py::cast(Rows(in<Rows>(self, field)));
  default: return py::cast(Few(in<Few>(self, field)));
  }
}

template <class T> py::class_<T> expose(py::module_ &m, const char *name, std::vector<Field> fields) {
  return py::class_<T>(m, name, py::module_local()) // the tests load the emulated module beside this one
      .def(py::init<>())
      .def(py::init<const T &>())
      .def("__setattr__", [fields](T &self, const char *field, py::handle value) {
        set(reinterpret_cast<char *>(&self), find(fields, field), value);
      })
      .def("__getattr__", [fields](T &self, const char *field) {
        return get(reinterpret_cast<char *>(&self), find(fields, field));
      });
}

} // namespace

#define FIELD(type, name) {type_of(decltype(type::name){}), #name, offsetof(type, name)}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("MAX_RANKS") = MAX_RANKS;
  m.attr("MAX_CHUNKS") = MAX_CHUNKS;
  m.attr("MAX_CHOICES") = MAX_CHOICES;
  m.attr("STATE_WORDS") = STATE_WORDS;
  m.attr("HALVES_AT") = Staging::HALVES;
  m.attr("ACKS_AT") = Staging::ACKS;
  m.attr("FLAGS_AT") = Staging::FLAGS;

  expose<Group>(m, "Group",
        {FIELD(Group, state), FIELD(Group, failure), FIELD(Group, rank), FIELD(Group, world),
         FIELD(Group, half_bytes), FIELD(Group, timeout_ns), FIELD(Group, signature)})
      .def("set_peers", [](Group &g, const std::vector<Address> &peers) {
        if (peers.size() > MAX_RANKS)
          throw std::invalid_argument("more ranks than MAX_RANKS");
        std::copy(peers.begin(), peers.end(), g.peer);
      });
  expose<Count>(m, "Count",
        {FIELD(Count, expert_TK), FIELD(Count, first_CB), FIELD(Count, T), FIELD(Count, K), FIELD(Count, experts),
         FIELD(Count, local_experts), FIELD(Count, world), FIELD(Count, chunk), FIELD(Count, chunks),
         FIELD(Count, stride)});
  expose<Totals>(m, "Totals",
        {FIELD(Totals, group), FIELD(Totals, first_CB), FIELD(Totals, counts_WC), FIELD(Totals, place_base_E),
         FIELD(Totals, segments), FIELD(Totals, group_ends_E), FIELD(Totals, group_sizes_E), FIELD(Totals, host),
         FIELD(Totals, T), FIELD(Totals, most_rows), FIELD(Totals, experts), FIELD(Totals, local_experts),
         FIELD(Totals, chunks), FIELD(Totals, stride), FIELD(Totals, serial)});
  expose<Places>(m, "Places",
        {FIELD(Places, group), FIELD(Places, expert_TK), FIELD(Places, first_CB), FIELD(Places, counts_WC),
         FIELD(Places, place_base_E), FIELD(Places, segments), FIELD(Places, slot_WT), FIELD(Places, place_RK),
         FIELD(Places, arriving_WC), FIELD(Places, T), FIELD(Places, places_at), FIELD(Places, ranges_at),
         FIELD(Places, K), FIELD(Places, experts), FIELD(Places, local_experts), FIELD(Places, chunk),
         FIELD(Places, chunks), FIELD(Places, stride), FIELD(Places, most_rows)});
  expose<Rows>(m, "Rows",
        {FIELD(Rows, group), FIELD(Rows, slot_WT), FIELD(Rows, place_RK), FIELD(Rows, arriving_WC),
         FIELD(Rows, first_CB), FIELD(Rows, counts_WC), FIELD(Rows, segments), FIELD(Rows, T), FIELD(Rows, P),
         FIELD(Rows, data_at), FIELD(Rows, scale_at), FIELD(Rows, weight_at), FIELD(Rows, K), FIELD(Rows, experts),
         FIELD(Rows, chunk), FIELD(Rows, chunks), FIELD(Rows, stride), FIELD(Rows, H), FIELD(Rows, fanout),
         FIELD(Rows, block), FIELD(Rows, floor), FIELD(Rows, scale_row), FIELD(Rows, weights)});
  expose<Dispatch>(m, "Dispatch",
        {FIELD(Dispatch, rows), FIELD(Dispatch, x_TH), FIELD(Dispatch, weight_TK), FIELD(Dispatch, out_PH),
         FIELD(Dispatch, out_scale), FIELD(Dispatch, out_weight_P), FIELD(Dispatch, group_ends_E),
         FIELD(Dispatch, group_sizes_E), FIELD(Dispatch, scale_stride_p), FIELD(Dispatch, scale_stride_b),
         FIELD(Dispatch, dtype), FIELD(Dispatch, local_experts)});
  expose<Combine>(m, "Combine",
        {FIELD(Combine, rows), FIELD(Combine, y_PH), FIELD(Combine, weight_P), FIELD(Combine, out_TH),
         FIELD(Combine, out_weight_TK), FIELD(Combine, dtype), FIELD(Combine, out_dtype)});
  expose<Few>(m, "Few",
        {FIELD(Few, group), FIELD(Few, index_TK), FIELD(Few, bound), FIELD(Few, routes), FIELD(Few, data_at),
         FIELD(Few, scale_at), FIELD(Few, route_at), FIELD(Few, count_at), FIELD(Few, T), FIELD(Few, K),
         FIELD(Few, experts), FIELD(Few, local_experts), FIELD(Few, max_tokens), FIELD(Few, H),
         FIELD(Few, index_bytes), FIELD(Few, send), FIELD(Few, receive), FIELD(Few, crew)});
  expose<FewDispatch>(m, "FewDispatch",
        {FIELD(FewDispatch, few), FIELD(FewDispatch, x_TH), FIELD(FewDispatch, scale_in),
         FIELD(FewDispatch, out_ERH), FIELD(FewDispatch, out_scale), FIELD(FewDispatch, out_count_E),
         FIELD(FewDispatch, row_bytes), FIELD(FewDispatch, dtype), FIELD(FewDispatch, block),
         FIELD(FewDispatch, floor), FIELD(FewDispatch, scale_row), FIELD(FewDispatch, scales),
         FIELD(FewDispatch, scale_kind)})
      .def("set_scale_strides", [](FewDispatch &a, int64_t e, int64_t r, int64_t b) {
        a.scale_strides[0] = e, a.scale_strides[1] = r, a.scale_strides[2] = b;
      });
  expose<FewCombine>(m, "FewCombine",
        {FIELD(FewCombine, few), FIELD(FewCombine, y_ERH), FIELD(FewCombine, weight_TK), FIELD(FewCombine, out_TH),
         FIELD(FewCombine, dtype), FIELD(FewCombine, out_dtype)});

  m.def("count", [](const Count &a, Address stream) { check(launch(a, stream), "count"); });
  m.def("totals", [](const Totals &a, Address stream) { check(launch(a, stream), "totals"); });
  m.def("places", [](const Places &a, int sms, Address stream) { check(launch(a, sms, stream), "places"); });
  m.def("dispatch", [](const Dispatch &a, int sms, Address stream) { check(launch(a, sms, stream), "dispatch"); });
  m.def("combine", [](const Combine &a, int sms, Address stream) { check(launch(a, sms, stream), "combine"); });
  m.def("few_dispatch", [](const FewDispatch &a, int sms, Address s) { check(launch(a, sms, s), "few_dispatch"); });
  m.def("few_combine", [](const FewCombine &a, int sms, Address s) { check(launch(a, sms, s), "few_combine"); });
  m.def("load", [] {
    check(load_route(), "route");
    check(load_dispatch(), "dispatch");
    check(load_combine(), "combine");
    check(load_few(), "few");
  });
  m.def("wait_for_totals", &wait_for_totals, py::call_guard<py::gil_scoped_release>());
}
