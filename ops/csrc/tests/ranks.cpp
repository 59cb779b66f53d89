// SPDX-License-Identifier: Apache-2.0
#include "ranks.h"
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <mpi.h>
#include <stdexcept>
#include <thread>

namespace {

constexpr double GRACE_SECONDS = 10; // of the host, beyond the deadline of the device
constexpr uint32_t FIRST_EPOCH = uint32_t(-24); // its 32 bits overflow within the first cases

// The compiler refuses a switch that leaves out a kind or a code of kernels.h.
const char *name_of(nvlink::Kind kind) {
  switch (kind) {
  case nvlink::COUNTS: return "counts";
  case nvlink::PLACES: return "places";
  case nvlink::DISPATCH: return "dispatch";
  case nvlink::COMBINE: return "combine";
  case nvlink::LOW_LATENCY_DISPATCH: return "low_latency_dispatch";
  case nvlink::LOW_LATENCY_COMBINE: return "low_latency_combine";
  case nvlink::ROWS: return "rows";
  }
  throw std::logic_error("unknown kind of exchange");
}

// Collective. Throws on every rank if `step` threw on one: the error of the lowest one, behind `what`.
template <class Step> void on_every_rank(const Ranks &ranks, const std::string &what, Step step) {
  std::string error;
  try {
    step();
  } catch (const std::exception &e) {
    error = what + e.what();
  }
  if (const std::string first = ranks.first_error(error); !first.empty())
    throw std::runtime_error(first);
}

// What the kernels recorded, in one line.
std::string described(const nvlink::Failure &f) {
  const std::string me = "rank " + std::to_string(f.rank), peer = "rank " + std::to_string(f.peer);
  const std::string where =
      std::string("'") + name_of(nvlink::Kind(f.phase)) + "', exchange " + std::to_string(f.epoch);
  switch (nvlink::Code(f.code)) {
  case nvlink::TIMEOUT: return me + " waited for " + peer + " until the deadline in " + where;
  case nvlink::MISMATCH: return me + " is in " + where + ", and " + peer + " makes another call";
  case nvlink::OVERFLOW:
    return me + ": " + peer + " would get " + std::to_string(f.detail) + " rows in " + where + ", more than fit";
  }
  throw std::logic_error("unknown code of a failure");
}

} // namespace

Ranks::Ranks(int64_t half_bytes, double seconds)
    : seconds(seconds), half_bytes(half_bytes) {
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  MPI_Comm host;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &host);
  int local, on_host;
  MPI_Comm_rank(host, &local);
  MPI_Comm_size(host, &on_host);
  MPI_Comm_free(&host);
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess)
    devices = 0;
  if (world < 2 || world > nvlink::MAX_RANKS || on_host != world)
    throw std::runtime_error("there are " + std::to_string(world) + " ranks, " + std::to_string(on_host) +
                             " of them on this host: start 2 to 8 on one host, as in mpirun -np 4");
  if (devices == 0)
    throw std::runtime_error("there is no CUDA device: run this on a machine with a GPU");
  sharing = (world + devices - 1) / devices;
  cudaIpcMemHandle_t mine{}, all[nvlink::MAX_RANKS];
  on_every_rank(*this, "", [&] {
    check(cudaSetDevice(local % devices), "cudaSetDevice");
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, local % devices), "cudaGetDeviceProperties");
    device_name = properties.name;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    failure = static_cast<nvlink::Failure *>(allocate_host(sizeof *failure));
    state = Array<uint32_t>(nvlink::STATE_WORDS);
    staging = allocate(nvlink::Staging::HALVES + 2 * half_bytes);
    check(cudaIpcGetMemHandle(&mine, staging), "cudaIpcGetMemHandle");
  });
  MPI_Allgather(&mine, sizeof mine, MPI_BYTE, all, sizeof mine, MPI_BYTE, MPI_COMM_WORLD);
  on_every_rank(*this, "rank " + std::to_string(rank) + " does not reach the memory of all ranks: ", [&] {
    for (int w = 0; w < world; w++) {
      void *at = staging;
      if (w != rank) {
        check(cudaIpcOpenMemHandle(&at, all[w], cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
        mapped.push_back(at);
      }
      peers[w] = nvlink::Address(at);
    }
    // CUDA would load a kernel at its first launch, and wait for running kernels first. Those may wait for a peer.
    for (const auto load : {nvlink::load_route, nvlink::load_dispatch, nvlink::load_combine, nvlink::load_low_latency})
      if (const int code = load())
        throw std::runtime_error("the kernels cannot be loaded (CUDA error " + std::to_string(code) +
                                 "): build them for this GPU by -DCMAKE_CUDA_ARCHITECTURES=...");
  });
  std::vector<uint32_t> words(nvlink::STATE_WORDS);
  words[0] = FIRST_EPOCH;
  state.set(words);
  // Every flag says that its rank has finished the exchange before the first one.
  const std::vector<uint32_t> header(nvlink::Staging::HALVES / 4, FIRST_EPOCH - 1);
  copy(staging, header.data(), nvlink::Staging::HALVES);
  wait("the start");
  MPI_Barrier(MPI_COMM_WORLD);
}

Ranks::~Ranks() {
  for (void *peer : mapped)
    cudaIpcCloseMemHandle(peer);
  MPI_Barrier(MPI_COMM_WORLD); // nobody maps the staging any more
  cudaFree(staging);
}

nvlink::Group Ranks::group(nvlink::Kind kind, const std::string &shape) const {
  nvlink::Group g;
  std::copy(std::begin(peers), std::end(peers), g.peer);
  g.state = state.address();
  g.failure = nvlink::Address(failure);
  g.rank = rank;
  g.world = world;
  g.half_bytes = half_bytes;
  g.timeout_ns = uint64_t(seconds * 1e9);
  uint32_t hash = 2166136261u; // FNV-1a
  for (unsigned char c : shape)
    hash = (hash ^ c) * 16777619u;
  g.signature = hash << 8 | kind;
  return g;
}

void Ranks::wait(const std::string &what) const {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds + GRACE_SECONDS);
  for (cudaError_t state; (state = cudaStreamQuery(stream)) != cudaSuccess;) {
    if (state != cudaErrorNotReady)
      check(state, "a kernel");
    if (std::chrono::steady_clock::now() > end) {
      std::fprintf(stderr, "rank %d: %s: the device is still busy %.0f s after the deadline of %.0f s\n", rank,
                   what.c_str(), GRACE_SECONDS, seconds);
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
    std::this_thread::yield();
  }
  if (failure->code)
    throw std::runtime_error(described(*failure));
}

std::string Ranks::first_error(const std::string &mine) const {
  const int none = nvlink::MAX_RANKS;
  int at = mine.empty() ? none : rank, first;
  MPI_Allreduce(&at, &first, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  if (first == none)
    return "";
  int length = int(mine.size());
  MPI_Bcast(&length, 1, MPI_INT, first, MPI_COMM_WORLD);
  std::string text = rank == first ? mine : std::string(length, ' ');
  MPI_Bcast(text.data(), length, MPI_CHAR, first, MPI_COMM_WORLD);
  return text;
}

double Ranks::largest(double mine) const {
  double most;
  MPI_Allreduce(&mine, &most, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return most;
}

void Ranks::need(int64_t bytes) const {
  if (bytes > half_bytes)
    throw std::runtime_error("an exchange needs " + std::to_string(bytes) + " bytes of staging, and " +
                             std::to_string(half_bytes) + " were allocated");
}
