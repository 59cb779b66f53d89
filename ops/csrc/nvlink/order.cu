// SPDX-License-Identifier: Apache-2.0
// The order in which a GEMM computes rows that a combine sends while it runs: see Order in kernels.h.
#include "rows.cuh"
#include <climits>

namespace nvlink {
namespace {

constexpr int TILES = 256; // of a block, and the threads that place them

// What is computed sooner has a smaller key. Tiles of padding alone come last.
__device__ int key_of(const Order &a, int tile, int most_chunks) {
  const int *ends = at<int>(a.group_ends_E);
  const int row = tile * ROW_ALIGNMENT;
  int expert = 0;
  for (int last = a.local_experts; expert < last;) { // the first whose group ends behind the row
    const int middle = (expert + last) / 2;
    if (ends[middle] <= row)
      expert = middle + 1;
    else
      last = middle;
  }
  if (expert == a.local_experts)
    return INT_MAX;
  const int from = row - (expert ? ends[expert - 1] : 0); // of the group
  const int run = chunks_of_run(most_chunks, a.parts), width = 2 + a.world + a.experts;
  int key = INT_MAX, begin = 0;
  for (int w = 0; w < a.world; w++) {
    const int *counts = at<int>(a.counts_WC) + w * width;
    const int rows = counts[2 + a.world + a.rank * a.local_experts + expert];
    if (rows && begin < from + ROW_ALIGNMENT && begin + rows > from) {
      const int chunk = int(int64_t(max(from - begin, 0)) * counts[1] / rows); // about
      key = min(key, chunk / run * a.world + (w - a.rank - 1 + a.world) % a.world);
    }
    begin += rows;
  }
  return key;
}

__global__ void __launch_bounds__(TILES) order(const __grid_constant__ Order a) {
  __shared__ int keys[TILES];
  int most_chunks = 0;
  for (int w = 0; w < a.world; w++)
    most_chunks = max(most_chunks, at<int>(a.counts_WC)[w * (2 + a.world + a.experts) + 1]);
  const int tile = blockIdx.x * TILES + threadIdx.x;
  const int own = tile < a.tiles ? key_of(a, tile, most_chunks) : 0;
  int place = 0; // how many come before
  for (int first = 0; first < a.tiles; first += TILES) {
    const int other = first + threadIdx.x;
    __syncthreads();
    keys[threadIdx.x] = other < a.tiles ? key_of(a, other, most_chunks) : INT_MAX;
    __syncthreads();
    for (int i = 0; i < min(TILES, a.tiles - first); i++)
      place += keys[i] < own || (keys[i] == own && first + i < tile);
  }
  if (tile < a.tiles)
    at<int>(a.order)[place] = tile;
}

} // namespace

int launch(const Order &a, Address stream) {
  if (a.tiles == 0)
    return 0;
  order<<<(a.tiles + TILES - 1) / TILES, TILES, 0, reinterpret_cast<cudaStream_t>(stream)>>>(a);
  return cudaGetLastError();
}

int load_order() {
  cudaFuncAttributes unused;
  return cudaFuncGetAttributes(&unused, order);
}

} // namespace nvlink
