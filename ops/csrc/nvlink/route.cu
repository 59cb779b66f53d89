// SPDX-License-Identifier: Apache-2.0
// Turns expert ids into rows: counts the rows for each rank, and finds the place of each row. The rows of an expert
// are in the order of (rank, token, choice), so the result is the same every time.
//
// If more rows come to a rank than fit, its largest groups are cut to the same size. Of a group that is cut, the
// choices of each rank keep the same share, rounded to rows, and the last ones are dropped. All ranks know all counts,
// so they agree.
#include "exchange.cuh"
#include <climits>

namespace nvlink {
namespace {

constexpr int WARPS = 8;
constexpr int PLACES_BLOCKS_PER_SM = 4;
constexpr int TOTALS_THREADS = 1024;
constexpr int BLOCK_SHARED_BYTES = 226 << 10; // sm_90 and sm_100 have 227 KiB, of which `exchange` needs a little

// Positions in a rank's row of counts, see Totals.
struct CountRow {
  int world, experts;
  __device__ int width() const { return 2 + world + experts; }
  __device__ static int tokens() { return 0; }
  __device__ static int chunks() { return 1; }
  __device__ static int to_rank(int w) { return 2 + w; }
  __device__ int of_expert(int e) const { return 2 + world + e; }
};

__device__ int padded(int rows) { return (rows + ROW_ALIGNMENT - 1) / ROW_ALIGNMENT * ROW_ALIGNMENT; }

// The ranks that serve a token's choices. Bit w stands for rank w.
__device__ uint32_t ranks_of(const int64_t *expert_K, int K, int experts, int local) {
  uint32_t ranks = 0;
  for (int k = 0; k < K; k++) {
    const int64_t e = expert_K[k];
    if (e >= 0 && e < experts)
      ranks |= 1u << int(e / local);
  }
  return ranks;
}

// One block counts one chunk. The columns of first_CB are the experts, then the ranks.
__global__ void __launch_bounds__(256) count(const __grid_constant__ Count a) {
  extern __shared__ int counted[];
  const int columns = a.experts + a.world;
  for (int i = threadIdx.x; i < columns; i += blockDim.x)
    counted[i] = 0;
  __syncthreads();
  const int64_t first = int64_t(blockIdx.x) * a.chunk;
  const int tokens = int(min(int64_t(a.chunk), a.T - first));
  const int64_t *expert = at<int64_t>(a.expert_TK) + first * a.K;
  for (int i = threadIdx.x; i < tokens * a.K; i += blockDim.x) {
    const int64_t e = expert[i];
    if (e >= 0 && e < a.experts)
      atomicAdd(&counted[e], 1); // the order of integer additions does not matter
  }
  for (int i = threadIdx.x; i < tokens; i += blockDim.x)
    for (uint32_t ranks = ranks_of(expert + i * a.K, a.K, a.experts, a.local_experts); ranks; ranks &= ranks - 1)
      atomicAdd(&counted[a.experts + __ffs(ranks) - 1], 1);
  __syncthreads();
  for (int i = threadIdx.x; i < columns; i += blockDim.x)
    at<int>(a.first_CB)[int64_t(i) * a.stride + blockIdx.x] = counted[i];
}

__device__ int inclusive_scan(int v) {
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int before = __shfl_up_sync(~0u, v, by);
    if (int(threadIdx.x % 32) >= by)
      v += before;
  }
  return v;
}

// All lanes of a warp call it. Replaces each chunk's count with the sum of the counts before it, and column[chunks]
// with the total. Returns the total to all lanes.
__device__ int scan_column(int *column, int chunks) {
  constexpr int LANE = 4, SPAN = 32 * LANE; // chunks that a lane, and a warp, take at a time
  const int lane = threadIdx.x % 32;
  int4 own[MAX_CHUNKS / SPAN];
#pragma unroll
  for (int i = 0; i < MAX_CHUNKS / SPAN; i++)
    if (i * SPAN + lane * LANE < chunks) // in a loop of its own, so that all loads are in flight together
      own[i] = load16(column + i * SPAN + lane * LANE);
  int before = 0;
#pragma unroll
  for (int i = 0; i < MAX_CHUNKS / SPAN; i++) {
    const int first = i * SPAN + lane * LANE;
    if (i * SPAN >= chunks)
      break;
    const int x = first < chunks ? own[i].x : 0, y = first + 1 < chunks ? own[i].y : 0;
    const int z = first + 2 < chunks ? own[i].z : 0, w = first + 3 < chunks ? own[i].w : 0;
    const int sum = x + y + z + w, upto = inclusive_scan(sum), start = before + upto - sum;
    if (first < chunks)
      store16(column + first, make_int4(start, start + x, start + x + y, start + x + y + z));
    before += __shfl_sync(~0u, upto, 31);
  }
  __syncwarp();
  if (lane == 0)
    column[chunks] = before;
  return before;
}

// All lanes of a warp call it. Returns how many rows the groups have, with padding, if none has more than `limit`.
__device__ int padded_rows(const int *size_E, int experts, int limit) {
  int rows = 0;
  for (int e = threadIdx.x % 32; e < experts; e += 32)
    rows += min(padded(size_E[e]), limit);
  return __shfl_sync(~0u, inclusive_scan(rows), 31);
}

// All lanes of a warp call it, if the groups do not fit into most_rows. Cuts the largest groups to the same size, the
// largest multiple of ROW_ALIGNMENT with which all groups fit. The first of them get what is left of most_rows,
// ROW_ALIGNMENT rows each. Returns the number of rows that were cut off to lane 0.
__device__ int cut(int *size_E, int experts, int most_rows) {
  int limit = 0;
  for (int step = 1 << 30; step >= ROW_ALIGNMENT; step /= 2)
    if (padded_rows(size_E, experts, limit + step) <= most_rows)
      limit += step;
  int more = (most_rows - padded_rows(size_E, experts, limit)) / ROW_ALIGNMENT, lost = 0;
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    for (int e = 0; e < experts; e++)
      if (const int size = size_E[e]; size > limit) {
        size_E[e] = min(size, more-- > 0 ? limit + ROW_ALIGNMENT : limit);
        lost += size - size_E[e];
      }
  return lost;
}

// Launched as one block.
__global__ void __launch_bounds__(TOTALS_THREADS) totals(const __grid_constant__ Totals a) {
  extern __shared__ int shared[];
  Exchange x(a.group);
  const int W = a.group.world, me = a.group.rank, warp = threadIdx.x / 32;
  const CountRow row{W, a.experts};
  int *counts = shared;                        // [W, row.width()]
  int *size_E = counts + W * row.width();      // [experts]: the rows of each group that fit
  int *start_E = size_E + a.experts;           // [experts]: the place of each group's first row
  int *mine = counts + me * row.width();

  for (int column = warp; column < a.experts + W; column += TOTALS_THREADS / 32) {
    const int total = scan_column(at<int>(a.first_CB) + int64_t(column) * a.stride, a.chunks);
    if (threadIdx.x % 32 == 0)
      mine[column < a.experts ? row.of_expert(column) : row.to_rank(column - a.experts)] = total;
  }
  if (threadIdx.x == 0) {
    mine[row.tokens()] = int(a.T);
    mine[row.chunks()] = a.chunks;
  }
  __syncthreads();
  if (x.live) // otherwise peers may still read what this half holds
    for (int i = threadIdx.x; i < W * row.width(); i += blockDim.x)
      at<int>(x.half(i / row.width()))[me * row.width() + i % row.width()] = mine[i % row.width()];
  __syncthreads();
  if (threadIdx.x < W && x.live) {
    x.announce(threadIdx.x, 0);
    x.await(threadIdx.x, 0);
  }
  __syncthreads();

  int *host = at<int>(a.host);
  const bool failed = x.failed();
  for (int i = threadIdx.x; i < W * row.width(); i += blockDim.x) {
    const int v = failed ? 0 : at<volatile int>(x.half(me))[i];
    counts[i] = v;
    at<int>(a.counts_WC)[i] = v;
    if (host)
      host[1 + i] = v;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < a.experts; e += blockDim.x) {
    size_E[e] = 0;
    for (int r = 0; r < W; r++)
      size_E[e] += counts[r * row.width() + row.of_expert(e)];
  }
  __syncthreads();
  if (threadIdx.x < W) {
    const int w = threadIdx.x;
    int recv = 0, send = 0, peer_recv = 0, peer_send = 0;
    for (int r = 0; r < w; r++) {
      recv += counts[r * row.width() + row.to_rank(me)];
      send += counts[me * row.width() + row.to_rank(r)];
    }
    for (int r = 0; r < me; r++) {
      peer_recv += counts[r * row.width() + row.to_rank(w)];
      peer_send += counts[w * row.width() + row.to_rank(r)];
    }
    int *segments = at<int>(a.segments);
    segments[RECV_BASE * W + w] = recv;
    segments[SEND_BASE * W + w] = send;
    segments[PEER_RECV_BASE * W + w] = peer_recv;
    segments[PEER_SEND_BASE * W + w] = peer_send;
  }
  if (warp < W) {
    const int w = warp, first = w * a.local_experts;
    const int rows = a.most_rows ? padded_rows(size_E + first, a.local_experts, INT_MAX) : 0;
    const int lost = rows > a.most_rows ? cut(size_E + first, a.local_experts, int(a.most_rows)) : 0;
    if (threadIdx.x % 32 == 0) {
      if (lost && !a.dropped)
        x.fail(OVERFLOW, w, rows);
      if (lost && a.dropped && w == me) {
        volatile int64_t *dropped = at<volatile int64_t>(a.dropped);
        *dropped = *dropped + lost; // the kernels of a group run one after the other, and nothing else writes to it
      }
      // Where the groups of rank w's experts begin.
      int end = 0;
      for (int e = first; e < first + a.local_experts; e++) {
        start_E[e] = end;
        end += padded(size_E[e]);
      }
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < a.experts; e += blockDim.x) {
    int before = 0, all = 0;
    for (int r = 0; r < W; r++) {
      const int rows = counts[r * row.width() + row.of_expert(e)];
      before += r < me ? rows : 0;
      all += rows;
    }
    const int size = size_E[e], upto = before + mine[row.of_expert(e)];
    const auto fitting = [&](int rows) { return size == all ? rows : int(int64_t(rows) * size / all); };
    at<int>(a.place_base_E)[e] = start_E[e] + fitting(before);
    at<int>(a.place_end_E)[e] = start_E[e] + fitting(upto);
    const int local = e - me * a.local_experts;
    if (local >= 0 && local < a.local_experts) {
      at<int>(a.group_sizes_E)[local] = size;
      at<int>(a.group_ends_E)[local] = start_E[e] + padded(size);
      if (host)
        host[1 + W * row.width() + local] = size;
    }
  }
  __threadfence_system(); // each thread orders its own stores to the host
  __syncthreads();
  if (host && threadIdx.x == 0)
    *reinterpret_cast<volatile int *>(host) = a.serial;
  x.finish();
}

struct PlacesWork {
  const Places &a;
  const Exchange &x;
  const CountRow row;
  // In shared memory:
  int *before; // [WARPS, experts + W]: each warp's next place for each expert, and next slot for each rank
  int *expert; // [chunk, K]: the chunk's ids. -1 marks a dropped choice
  int *place;  // [chunk, K]
  int *slot;   // [chunk, W]

  __device__ PlacesWork(const Places &a, const Exchange &x, int *shared)
      : a(a), x(x), row{a.group.world, a.experts}, before(shared),
        expert(before + WARPS * (a.experts + a.group.world)),
        place(expert + a.chunk * a.K), slot(place + a.chunk * a.K) {}

  __device__ int *places_of(int rank) const { return at<int>(x.half(rank), a.places_at); }
  __device__ int2 *range_of(int rank, int source, int c) const {
    return at<int2>(x.half(rank), a.ranges_at) + source * MAX_CHUNKS + c;
  }
  __device__ uint32_t ranks_of(int t) const {
    uint32_t ranks = 0;
    for (int k = 0; k < a.K; k++)
      if (const int e = expert[t * a.K + k]; e >= 0)
        ranks |= 1u << e / a.local_experts;
    return ranks;
  }

  __device__ void send(int c) {
    const int W = a.group.world, me = a.group.rank, K = a.K, columns = a.experts + W;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t lower = (1u << lane) - 1;
    const int *first_CB = at<int>(a.first_CB);
    const int64_t chunk_begin = int64_t(c) * a.chunk;
    const int tokens = int(min(int64_t(a.chunk), a.T - chunk_begin));
    const int share = (a.chunk + WARPS - 1) / WARPS;
    const int begin = min(warp * share, tokens), end = min(begin + share, tokens);
    int *mine = before + warp * columns;

    for (int i = threadIdx.x; i < tokens * K; i += blockDim.x) {
      const int64_t e = at<int64_t>(a.expert_TK)[chunk_begin * K + i];
      expert[i] = e >= 0 && e < a.experts ? int(e) : -1;
    }
    for (int i = threadIdx.x; i < WARPS * columns; i += blockDim.x)
      before[i] = 0;
    __syncthreads();
    // Count what each warp has of each expert and rank. Then add up what comes before each warp.
    for (int i = begin * K + lane; i < end * K; i += 32)
      if (expert[i] >= 0)
        atomicAdd(&mine[expert[i]], 1);
    for (int t = begin + lane; t < end; t += 32)
      for (uint32_t ranks = ranks_of(t); ranks; ranks &= ranks - 1)
        atomicAdd(&mine[a.experts + __ffs(ranks) - 1], 1);
    __syncthreads();
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
      int sum = first_CB[int64_t(i) * a.stride + c] + (i < a.experts ? at<int>(a.place_base_E)[i] : 0);
      for (int w = 0; w < WARPS; w++) {
        const int own = before[w * columns + i];
        before[w * columns + i] = sum;
        sum += own;
      }
    }
    __syncthreads();

    for (int t0 = begin; t0 < end; t0 += 32) {
      const int t = t0 + lane;
      const uint32_t ranks = t < end ? ranks_of(t) : 0;
      for (int w = 0; w < W; w++) {
        const uint32_t wanting = __ballot_sync(~0u, ranks >> w & 1);
        const int base = mine[a.experts + w];
        if (t < end) {
          const int own = ranks >> w & 1 ? base + __popc(wanting & lower) : -1;
          slot[t * W + w] = own;
          at<int>(a.slot_WT)[w * a.T + chunk_begin + t] = own;
        }
        __syncwarp();
        if (lane == 0)
          mine[a.experts + w] = base + __popc(wanting);
        __syncwarp();
      }
    }
    for (int i0 = begin * K; i0 < end * K; i0 += 32) {
      const int i = i0 + lane;
      const int e = i < end * K ? expert[i] : -1;
      const uint32_t same = __match_any_sync(~0u, e);
      const int own = e >= 0 ? mine[e] + __popc(same & lower) : -1;
      __syncwarp();
      if (e >= 0 && (same & lower) == 0)
        mine[e] += __popc(same);
      __syncwarp();
      if (i < end * K)
        place[i] = e >= 0 && a.place_end_E && own >= at<int>(a.place_end_E)[e] ? -1 : own;
    }
    __syncthreads();
    // Send each rank the places of the tokens that it gets. Rows that are neighbors here are neighbors there.
    for (int i = threadIdx.x; i < W * tokens * K; i += blockDim.x) {
      const int w = i / (tokens * K), j = i - w * tokens * K, t = j / K;
      const int to = slot[t * W + w];
      if (to >= 0) {
        const int64_t r = at<int>(a.segments)[PEER_RECV_BASE * W + w] + int64_t(to);
        places_of(w)[r * K + j - t * K] = expert[j] >= 0 && expert[j] / a.local_experts == w ? place[j] : -1;
      }
    }
    if (threadIdx.x < W) {
      const int *first = first_CB + int64_t(a.experts + threadIdx.x) * a.stride + c;
      *range_of(threadIdx.x, me, c) = make_int2(first[0], first[1] - first[0]);
    }
    __syncthreads(); // before the next chunk overwrites shared memory
  }

  __device__ void announce(int c) {
    if (threadIdx.x < a.group.world)
      x.announce(threadIdx.x, c);
  }

  __device__ int source(int i) const { return (i + a.group.rank) % a.group.world; }
  __device__ int chunk(int i) const { return i / a.group.world; }
  __device__ bool skip(int i) const {
    return chunk(i) >= at<int>(a.counts_WC)[source(i) * row.width() + row.chunks()];
  }
  __device__ void await(int i) const { x.await(source(i), chunk(i)); }

  __device__ void receive(int i) {
    const int w = source(i), c = chunk(i), K = a.K;
    const volatile int *told = &range_of(a.group.rank, w, c)->x;
    const int2 range = make_int2(told[0], told[1]);
    const int64_t begin = (at<int>(a.segments)[RECV_BASE * a.group.world + w] + int64_t(range.x)) * K;
    const volatile int *from = places_of(a.group.rank);
    for (int64_t j = begin + threadIdx.x; j < begin + int64_t(range.y) * K; j += blockDim.x)
      at<int>(a.place_RK)[j] = from[j];
    if (threadIdx.x == 0)
      at<int2>(a.arriving_WC)[w * MAX_CHUNKS + c] = range;
  }
};

__global__ void __launch_bounds__(32 * WARPS, PLACES_BLOCKS_PER_SM) places(const __grid_constant__ Places a) {
  extern __shared__ int shared[];
  Exchange x(a.group);
  PlacesWork work(a, x, shared);
  int most_chunks = 0;
  for (int w = 0; w < a.group.world; w++)
    most_chunks = max(most_chunks, at<int>(a.counts_WC)[w * work.row.width() + work.row.chunks()]);
  exchange(x, work, a.chunks, most_chunks * a.group.world);
  x.finish();
}

int places_bytes(int world, int experts, int K, int chunk) {
  return (WARPS * (experts + world) + chunk * (2 * K + world)) * int(sizeof(int));
}

int totals_bytes(int world, int experts) { return (world * (2 + world + experts) + 2 * experts) * int(sizeof(int)); }

template <class Kernel> int with_shared(Kernel kernel, int bytes) {
  return bytes > 48 << 10 ? cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) : 0;
}

} // namespace

int launch(const Count &a, Address stream) {
  const int bytes = (a.experts + a.world) * int(sizeof(int));
  if (a.chunks == 0)
    return 0;
  count<<<a.chunks, 256, bytes, reinterpret_cast<cudaStream_t>(stream)>>>(a);
  return cudaGetLastError();
}

int launch(const Totals &a, Address stream) {
  const int bytes = totals_bytes(a.group.world, a.experts);
  if (int error = with_shared(totals, bytes))
    return error;
  totals<<<1, TOTALS_THREADS, bytes, reinterpret_cast<cudaStream_t>(stream)>>>(a);
  return cudaGetLastError();
}

int launch(const Places &a, int sms, Address stream) {
  const int bytes = places_bytes(a.group.world, a.experts, a.K, a.chunk);
  if (int error = with_shared(places, bytes))
    return error;
  places<<<sms * PLACES_BLOCKS_PER_SM, 32 * WARPS, bytes, reinterpret_cast<cudaStream_t>(stream)>>>(a);
  return cudaGetLastError();
}

bool fits(int world, int experts, int K, int chunk) {
  return max(totals_bytes(world, experts), places_bytes(world, experts, K, chunk)) <= BLOCK_SHARED_BYTES;
}

int load_route() {
  cudaFuncAttributes unused;
  int error = cudaFuncGetAttributes(&unused, count);
  error = error ? error : cudaFuncGetAttributes(&unused, totals);
  return error ? error : cudaFuncGetAttributes(&unused, places);
}

} // namespace nvlink
