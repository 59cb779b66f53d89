// SPDX-License-Identifier: Apache-2.0
// The order in which a GEMM computes rows that a combine sends, or that a dispatch brings, while it runs: see Order in
// kernels.h.
#include "rows.cuh"
#include <climits>

namespace nvlink {
namespace {

constexpr int THREADS = 256;

// One block for each item that is sent: 128 rows are the more urgent, the sooner the combine sends any of them, or the
// dispatch has brought all of them.
__global__ void __launch_bounds__(THREADS) urgency(const __grid_constant__ Order a) {
  if (*static_cast<volatile uint32_t *>(&at<State>(a.rows.group.state)->failed))
    return; // the tables may not have been written
  const RowsTables v{a.rows};
  const Sends sends(v, a.parts);
  for (int i = blockIdx.x; i < sends.count(); i += gridDim.x) {
    const int w = sends.owner(i);
    if (sends.nth(i) < v.chunks_of(w))
      v.each_tile(v.arriving(w, v.turned(w, sends.nth(i))), [&](int tile, int) {
        int *urgency = at<int>(a.urgency) + tile; // in whatever order: the same
        atomicMax(urgency, a.arriving ? 1 + sends.nth(i) / sends.run : INT_MAX - sends.turn(i));
      });
  }
}

// A thread for each tile: how many come before it. Of equally urgent ones, in their own order: neighbours share weights.
__global__ void __launch_bounds__(THREADS) order(const __grid_constant__ Order a) {
  __shared__ int others[THREADS];
  const auto urgency = [&](int tile) { // what is neither sent nor brought comes last
    const int value = at<int>(a.urgency)[tile];
    return value && a.arriving ? INT_MAX - value : value;
  };
  const int tile = blockIdx.x * THREADS + threadIdx.x;
  const int own = tile < a.tiles ? urgency(tile) : 0;
  int before = 0;
  for (int first = 0; first < a.tiles; first += THREADS) {
    __syncthreads();
    others[threadIdx.x] = first + int(threadIdx.x) < a.tiles ? urgency(first + threadIdx.x) : 0;
    __syncthreads();
    for (int i = 0; i < min(THREADS, a.tiles - first); i++)
      before += others[i] > own || (others[i] == own && first + i < tile);
  }
  if (tile < a.tiles)
    at<int>(a.order)[before] = tile;
}

} // namespace

int launch(const Order &a, int sms, Address stream) {
  if (a.tiles == 0)
    return 0;
  const auto on = reinterpret_cast<cudaStream_t>(stream);
  urgency<<<4 * sms, THREADS, 0, on>>>(a);
  order<<<(a.tiles + THREADS - 1) / THREADS, THREADS, 0, on>>>(a);
  return cudaGetLastError();
}

int load_order() {
  cudaFuncAttributes unused;
  const int error = cudaFuncGetAttributes(&unused, urgency);
  return error ? error : cudaFuncGetAttributes(&unused, order);
}

} // namespace nvlink
