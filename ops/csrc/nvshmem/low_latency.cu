// SPDX-License-Identifier: Apache-2.0
// The low-latency exchange over NVSHMEM: messages are written here, and put into the symmetric heaps of their ranks.
// The message for this rank itself is written where it belongs.
#include "../nvlink/low_latency.cuh"
#include "exchange.cuh"

namespace nvshmem {
namespace {

struct Puts : Exchange {
  static constexpr int RANKS = MAX_PES;
  __device__ explicit Puts(const LowLatency &a) : Exchange(a.group), a(a) {}
  __device__ Address half(int) const { return Exchange::half(); }
  __device__ Address outbox(int w) const { return Exchange::half() + outbox_at(w); }
  __device__ void put(int w, int64_t begin, int64_t bytes, int chunk) const {
    if (w != g.rank)
      put_warp(w, a.lands_at + begin, outbox_at(w) + begin, bytes, chunk);
    else if (threadIdx.x % 32 == 0)
      announce_here(chunk);
  }
  __device__ int64_t outbox_at(int w) const { return w == g.rank ? a.lands_at : a.outbox_at + w * a.message; }

  const LowLatency &a;
};

} // namespace

int launch(const LowLatencyDispatch &a, int sms, Address stream) { return launch_over<Puts>(a, sms, stream); }
int launch(const LowLatencyCombine &a, int sms, Address stream) { return launch_over<Puts>(a, sms, stream); }
int load_low_latency() { return load_over<Puts>(); }

} // namespace nvshmem
