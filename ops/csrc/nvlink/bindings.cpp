// SPDX-License-Identifier: Apache-2.0
// The kernels' arguments and launches for Python: one class for each struct of kernels.h.
#include "fields.h"
#include "kernels.h"
#include "shared_fields.h"
#include <atomic>
#include <chrono>
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <stdexcept>
#include <string>

using namespace nvlink;

namespace {

void check(int error, const char *what, const char *doing = "launching") {
  if (error)
    throw std::runtime_error(std::string(doing) + " the NVLink transport's kernel '" + what +
                             "' failed: " + cudaGetErrorString(cudaError_t(error)));
}

// Spins until the kernel `totals` has written its last word. Returns false after `seconds`, or if an exchange failed.
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

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("MAX_RANKS") = MAX_RANKS;
  m.attr("MAX_CHUNKS") = MAX_CHUNKS;
  m.attr("MAX_CHOICES") = MAX_CHOICES;
  m.attr("STATE_WORDS") = STATE_WORDS;
  m.attr("OUTBOXES") = false; // whether LowLatency::outbox_at is used
  m.attr("HALVES_AT") = Staging::HALVES;

  expose_shared(m);
  expose<Count>(m, "Count",
        {FIELD(Count, expert_TK), FIELD(Count, first_CB), FIELD(Count, T), FIELD(Count, K), FIELD(Count, experts),
         FIELD(Count, local_experts), FIELD(Count, world), FIELD(Count, chunk), FIELD(Count, chunks),
         FIELD(Count, stride)});
  expose<Totals>(m, "Totals",
        {FIELD(Totals, group), FIELD(Totals, first_CB), FIELD(Totals, counts_WC), FIELD(Totals, place_base_E),
         FIELD(Totals, segments), FIELD(Totals, group_ends_E), FIELD(Totals, group_sizes_E), FIELD(Totals, host),
         FIELD(Totals, place_end_E), FIELD(Totals, dropped), FIELD(Totals, T), FIELD(Totals, most_rows),
         FIELD(Totals, experts), FIELD(Totals, local_experts), FIELD(Totals, chunks), FIELD(Totals, stride),
         FIELD(Totals, serial)});
  expose<Places>(m, "Places",
        {FIELD(Places, group), FIELD(Places, expert_TK), FIELD(Places, first_CB), FIELD(Places, counts_WC),
         FIELD(Places, place_base_E), FIELD(Places, segments), FIELD(Places, slot_WT), FIELD(Places, place_RK),
         FIELD(Places, arriving_WC), FIELD(Places, T), FIELD(Places, places_at), FIELD(Places, ranges_at),
         FIELD(Places, K), FIELD(Places, experts), FIELD(Places, local_experts), FIELD(Places, chunk),
         FIELD(Places, chunks), FIELD(Places, stride), FIELD(Places, place_end_E)});
  expose<Rows>(m, "Rows",
        {FIELD(Rows, group), FIELD(Rows, slot_WT), FIELD(Rows, place_RK), FIELD(Rows, arriving_WC),
         FIELD(Rows, first_CB), FIELD(Rows, counts_WC), FIELD(Rows, segments), FIELD(Rows, T), FIELD(Rows, P),
         FIELD(Rows, data_at), FIELD(Rows, scale_at), FIELD(Rows, weight_at), FIELD(Rows, K), FIELD(Rows, experts),
         FIELD(Rows, chunk), FIELD(Rows, chunks), FIELD(Rows, stride), FIELD(Rows, H), FIELD(Rows, block),
         FIELD(Rows, floor), FIELD(Rows, scale_row), FIELD(Rows, weights)});
  expose<Dispatch>(m, "Dispatch",
        {FIELD(Dispatch, rows), FIELD(Dispatch, x_TH), FIELD(Dispatch, weight_TK), FIELD(Dispatch, out_PH),
         FIELD(Dispatch, out_scale), FIELD(Dispatch, out_weight_P), FIELD(Dispatch, group_ends_E),
         FIELD(Dispatch, group_sizes_E), FIELD(Dispatch, scale_stride_p), FIELD(Dispatch, scale_stride_b),
         FIELD(Dispatch, dtype), FIELD(Dispatch, local_experts)});
  expose<Combine>(m, "Combine",
        {FIELD(Combine, rows), FIELD(Combine, y_PH), FIELD(Combine, weight_P), FIELD(Combine, out_TH),
         FIELD(Combine, out_weight_TK), FIELD(Combine, dtype), FIELD(Combine, out_dtype)});

  m.def("count", [](const Count &a, Address stream) { check(launch(a, stream), "count"); });
  m.def("totals", [](const Totals &a, Address stream) { check(launch(a, stream), "totals"); });
  m.def("places", [](const Places &a, int sms, Address stream) { check(launch(a, sms, stream), "places"); });
  m.def("dispatch", [](const Dispatch &a, int sms, Address stream) { check(launch(a, sms, stream), "dispatch"); });
  m.def("combine", [](const Combine &a, int sms, Address stream) { check(launch(a, sms, stream), "combine"); });
  m.def("low_latency_dispatch", [](const LowLatencyDispatch &a, int sms, Address stream) {
    check(launch(a, sms, stream), "low_latency_dispatch");
  });
  m.def("low_latency_combine", [](const LowLatencyCombine &a, int sms, Address stream) {
    check(launch(a, sms, stream), "low_latency_combine");
  });
  m.def("row_exchange", [](const RowExchange &a, int sms, Address stream) {
    check(launch(a, sms, stream), "row_exchange");
  });
  m.def("fits", &fits);
  m.def("load", [] {
    check(load_route(), "route", "loading");
    check(load_dispatch(), "dispatch", "loading");
    check(load_combine(), "combine", "loading");
    check(load_low_latency(), "low_latency", "loading");
    check(load_row_exchange(), "row_exchange", "loading");
  });
  m.def("wait_for_totals", &wait_for_totals, py::call_guard<py::gil_scoped_release>());
}
