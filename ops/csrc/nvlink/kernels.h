// SPDX-License-Identifier: Apache-2.0
// What the host hands to the kernels of the NVLink transport. Addresses are integers: this header needs no CUDA.
//
// Letters as in ds_mxfp8_moe/transport: T tokens of this rank, K choices, W ranks, E experts of one rank, S rows sent,
// R rows received, P expert-sorted rows. A chunk is a run of neighbouring tokens of one rank: what one team of
// threads sends at a time, and what one flag announces.
#pragma once
#include <cstdint>

namespace nvlink {

constexpr int MAX_RANKS = 8;
constexpr int MAX_CHUNKS = 1024;   // of one rank's tokens
constexpr int MAX_CHOICES = 32;    // a warp's lanes
constexpr int ROW_ALIGNMENT = 128; // rows of an expert's group

using Address = uint64_t;

// Beginnings of the staging's parts, in bytes. Two halves follow the header and serve exchanges in turn.
struct Staging {
  static constexpr int64_t ACKS = 0;    // u32 [W]: the last exchange that each peer has read from its staging
  static constexpr int64_t CALLS = 128; // u64 [2][W]: each peer's call: its epoch, and above it the signature
  static constexpr int64_t FLAGS = 256; // u64 [W][MAX_CHUNKS]: the call in which a chunk of that rank was complete
  static constexpr int64_t HALVES = FLAGS + 8ll * MAX_RANKS * MAX_CHUNKS;
};

enum Kind : uint32_t { COUNTS = 1, PLACES = 2, DISPATCH = 3, COMBINE = 4, FEW_DISPATCH = 5, FEW_COMBINE = 6 };
enum Code : uint32_t { TIMEOUT = 1, MISMATCH = 2, OVERFLOW = 3 };
enum Dtype : int { BF16 = 0, FP16 = 1, FP32 = 2 };

// Details of a TIMEOUT: not the peer's, but of the GEMM beside the exchange; of the exchange's own multiprocessors.
constexpr uint32_t OWN_GEMM = 1, OWN_PLACE = 2;

// In host memory that the device writes: why the exchange failed. `code` is written last.
struct Failure {
  uint32_t code, rank, peer, phase, epoch, detail;
};

// In this device's memory; only its own kernels touch it.
struct State {
  uint32_t epoch;    // of the next exchange
  uint32_t arrived, finished; // teams that have begun with this one, and that are through
  uint32_t sent, received;    // items of it that teams have taken
  uint32_t failed;
};
constexpr int STATE_WORDS = sizeof(State) / 4;

// The group, and the exchange that a kernel takes part in.
struct Group {
  Address peer[MAX_RANKS] = {}; // each rank's staging, as this rank addresses it
  Address state = 0, failure = 0;
  int rank = 0, world = 0;
  int64_t half_bytes = 0;
  uint64_t timeout_ns = 0;
  uint32_t signature = 0; // of the call: kind in the low byte, shapes above; equal on all ranks
};

// How many of this rank's choices go to each expert, and of its tokens to each rank, in each chunk.
struct Count {
  Address expert_TK = 0;   // int64, global ids; -1: dropped
  Address first_CB = 0;    // int32 [experts + W, stride]: out
  int64_t T = 0;
  int K = 0, experts = 0, local_experts = 0, world = 0, chunk = 0, chunks = 0, stride = 0;
};

// Sums up, tells every peer, waits for theirs. Count row: T, chunks, rows to each rank, choices for each expert.
struct Totals {
  Group group;
  Address first_CB = 0;      // in: counts; out: how many stand before each chunk, and at [chunks] the total
  Address counts_WC = 0;     // int32 [W, 2 + W + experts]: out, every rank's row
  Address place_base_E = 0;  // int32 [experts]: out, where this rank's first row for an expert stands at its owner
  Address segments = 0;      // int32 [4, W]: out, see Segments
  Address group_ends_E = 0;  // int32 [local]: out
  Address group_sizes_E = 0; // int32 [local]: out
  Address host = 0;          // int32 [1 + W * (2 + W + experts) + local] host: out; `serial` first, written last
  int64_t T = 0, most_rows = 0; // most_rows: of P; more is an overflow. 0: no limit
  int experts = 0, local_experts = 0, chunks = 0, stride = 0, serial = 0;
};

// Rows of Totals::segments, each [W].
enum Segments { RECV_BASE = 0, SEND_BASE = 1, PEER_RECV_BASE = 2, PEER_SEND_BASE = 3 };

// Finds each choice's row at its owner and tells that rank.
struct Places {
  Group group;
  Address expert_TK = 0, first_CB = 0, counts_WC = 0, place_base_E = 0, segments = 0;
  Address slot_WT = 0;    // int32 [W, T]: out, row among those sent to a rank; -1: not sent
  Address place_RK = 0;   // int32 [R, K]: out; -1: served elsewhere
  Address arriving_WC = 0; // int32 [W, MAX_CHUNKS, 2]: out, each chunk's first row and rows among those of its rank
  int64_t T = 0, places_at = 0, ranges_at = 0; // *_at: in a half
  int K = 0, experts = 0, local_experts = 0, chunk = 0, chunks = 0, stride = 0, most_rows = 0;
};

// What dispatch and combine know of the rows that travel.
struct Rows {
  Group group;
  Address slot_WT = 0, place_RK = 0, arriving_WC = 0, first_CB = 0, counts_WC = 0, segments = 0;
  int64_t T = 0, P = 0;
  int64_t data_at = 0, scale_at = 0, weight_at = 0; // in a half
  int K = 0, experts = 0, chunk = 0, chunks = 0, stride = 0;
  int H = 0, fanout = 1;     // fanout: that many of the T come from one row of x, and are added up in one row of y
  int block = 0, floor = 0;  // block 0: unquantised
  int scale_row = 0;         // bytes of a row's scales in staging
  int weights = 0;           // whether K numbers travel with each row (their addresses are 0 where there are no rows)
};

struct Dispatch {
  Rows rows;
  Address x_TH = 0, weight_TK = 0;
  Address out_PH = 0, out_scale = 0, out_weight_P = 0;
  Address group_ends_E = 0, group_sizes_E = 0;
  int64_t scale_stride_p = 0, scale_stride_b = 0;
  // For a GEMM that begins meanwhile: here it finds how many rows of each 128 are in their places, padding included.
  Address arrived = 0;            // uint32 [P / 128], zeros; address 0: nobody asks
  Address begun = 0;              // uint32, zero: how many blocks of the dispatch have begun
  int dtype = 0, local_experts = 0;
};

// Waits until a dispatch's blocks have begun: a GEMM that waits for its rows must not take their place.
struct Begun {
  Group group;
  Address begun = 0; // Dispatch's
  int blocks = 0;
};

struct Combine {
  Rows rows;
  Address y_PH = 0, weight_P = 0;
  Address out_TH = 0, out_weight_TK = 0;
  // A GEMM that runs beside computes y_PH, in the order of Order, and counts its blocks of 64 rows by 128 columns here.
  Address done = 0;               // uint32 [P / 128]; address 0: y_PH is there
  int parts = 0;                  // Order's
  int dtype = 0, out_dtype = 0;   // of y_PH; of out_TH and of an unquantised wire
};

// In which order a GEMM computes its 128 rows at a time. Chunks of tokens are sent in `parts` runs. If it feeds a
// combine, within a run owner after owner; of 128 rows that belong to several, what is sent first counts. If a dispatch
// brings its rows (`arriving`), what is sent last.
struct Order {
  Rows rows;
  Address urgency = 0;            // int32 [tiles], zeros
  Address order = 0;              // int32 [tiles]: out
  int tiles = 0, parts = 0, arriving = 0;
};

// The exchange of few tokens at low latency: one kernel each way, nothing sized by what is routed. An expert has room
// for every token of every rank.
struct Few {
  Group group;
  Address index_TK = 0;     // ids of experts; beyond the experts, or negative: dropped
  Address bound = 0;        // uint32 [1]: how many of the T there are, T at most; address 0: all
  Address routes = 0;       // int32 [W, max_tokens, K] and [W]: the row of each choice that is served here; -1: none
  int64_t data_at = 0, scale_at = 0, route_at = 0, count_at = 0; // in a half
  int T = 0, K = 0, experts = 0, local_experts = 0, max_tokens = 0, H = 0;
  int index_bytes = 8;      // of an id: 4 or 8
  int send = 1, receive = 1;
  int crew = 1;             // warps that move a row together: 1, or all of a block
};

enum ScaleKind : int { BYTES = 0, WORDS = 1, BYTES_TO_FLOATS = 2 }; // as they travel, and as they are handed on

struct FewDispatch {
  Few few;
  Address x_TH = 0, scale_in = 0; // scale_in: of rows that come quantised, scale_row bytes each; 0: they do not
  Address out_ERH = 0, out_scale = 0, out_count_E = 0;
  int64_t scale_strides[3] = {};  // of out_scale [local, max_tokens * W, scales], in bytes
  int row_bytes = 0;              // on the wire
  int dtype = 0, block = 0, floor = 0; // block 0: rows travel as they come
  int scale_row = 0;              // bytes of a row's scales on the wire, a multiple of 4
  int scales = 0, scale_kind = 0; // of a row in out_scale
};

struct FewCombine {
  Few few;
  Address y_ERH = 0, weight_TK = 0, out_TH = 0;
  int dtype = 0, out_dtype = 0;   // of y; of out and the wire
};

// Launches on the current device, for so many of its multiprocessors. Streams are cudaStream_t; errors are
// cudaError_t, 0: none.
int launch(const Count &, Address stream);
int launch(const Totals &, Address stream);
int launch(const Places &, int sms, Address stream);
int launch(const Dispatch &, int sms, Address stream);
int launch(const Begun &, Address stream);
int launch(const Combine &, int sms, Address stream);
int launch(const Order &, int sms, Address stream);
int launch(const FewDispatch &, int sms, Address stream);
int launch(const FewCombine &, int sms, Address stream);
// Whether blocks of `totals` and `places` can hold so many experts, and chunks of so many tokens.
bool fits(int world, int experts, int K, int chunk);
// Read the kernels into device memory: none is loaded while another waits for a peer.
int load_route();
int load_dispatch();
int load_combine();
int load_order();
int load_few();

} // namespace nvlink
