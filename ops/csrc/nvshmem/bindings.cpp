// SPDX-License-Identifier: Apache-2.0
// NVSHMEM's start, its symmetric heap and the launch, for Python.
#include "../nvlink/shared_fields.h"
#include "kernels.h"
#include <cuda_runtime_api.h>
#include <nvshmem.h>
#include <nvshmemx.h>
#include <stdexcept>

using namespace nvshmem;

namespace {

void check(int error, const char *what) {
  if (error)
    throw std::runtime_error(std::string(what) + " failed: " + cudaGetErrorString(cudaError_t(error)));
}

py::bytes unique_id() {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  if (const int status = nvshmemx_get_uniqueid(&id))
    throw std::runtime_error("nvshmemx_get_uniqueid returned " + std::to_string(status));
  return py::bytes(reinterpret_cast<const char *>(&id), sizeof id);
}

// Starts NVSHMEM in this process, on the current device. Collective between `world` processes.
void start(int rank, int world, const std::string &bytes) {
  nvshmemx_uniqueid_t id;
  if (bytes.size() != sizeof id)
    throw std::runtime_error("the ranks have NVSHMEM of different versions");
  std::memcpy(&id, bytes.data(), sizeof id);
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  if (const int status = nvshmemx_set_attr_uniqueid_args(rank, world, &id, &attributes))
    throw std::runtime_error("nvshmemx_set_attr_uniqueid_args returned " + std::to_string(status));
  // nvshmemx_init_attr would end the process if it failed.
  int provided;
  const nvshmemi_version_t version = {NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION,
                                      NVSHMEM_VENDOR_PATCH_VERSION};
  if (const int status = nvshmemi_init_thread(NVSHMEM_THREAD_SERIALIZED, &provided, NVSHMEMX_INIT_WITH_UNIQUEID,
                                              &attributes, version))
    throw std::runtime_error("NVSHMEM's start returned " + std::to_string(status));
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("MAX_RANKS") = MAX_RANKS;
  m.attr("MAX_CHUNKS") = MAX_CHUNKS;
  m.attr("STATE_WORDS") = STATE_WORDS;
  m.attr("OUTBOXES") = true; // whether LowLatency::outbox_at is used
  m.attr("HALVES_AT") = ShmemStaging::HALVES;

  expose_shared(m);
  expose<ShmemExchange>(m, "ShmemExchange", {FIELD(ShmemExchange, rows), FIELD(ShmemExchange, pe)});

  m.def("unique_id", &unique_id);
  // Whether someone in this process has started NVSHMEM.
  m.def("started", [] { return nvshmemx_init_status() != NVSHMEM_STATUS_NOT_INITIALIZED; });
  m.def("start", &start, py::call_guard<py::gil_scoped_release>());
  // The address of symmetric memory, or 0 if the heap has no room. Collective, as its end is.
  m.def("allocate", [](size_t bytes) { return Address(nvshmem_malloc(bytes)); },
        py::call_guard<py::gil_scoped_release>());
  m.def("free", [](Address address) { nvshmem_free(reinterpret_cast<void *>(address)); },
        py::call_guard<py::gil_scoped_release>());
  m.def("row_exchange", [](const ShmemExchange &a, int sms, Address stream) {
    check(launch(a, sms, stream), "launching the kernel 'row_exchange' over NVSHMEM");
  });
  m.def("low_latency_dispatch", [](const LowLatencyDispatch &a, int sms, Address stream) {
    check(nvshmem::launch(a, sms, stream), "launching the kernel 'low_latency_dispatch' over NVSHMEM");
  });
  m.def("low_latency_combine", [](const LowLatencyCombine &a, int sms, Address stream) {
    check(nvshmem::launch(a, sms, stream), "launching the kernel 'low_latency_combine' over NVSHMEM");
  });
  m.def("load", [] {
    check(nvshmem::load_row_exchange(), "loading the kernel 'row_exchange' over NVSHMEM");
    check(nvshmem::load_low_latency(), "loading the low-latency kernels over NVSHMEM");
  });
}
