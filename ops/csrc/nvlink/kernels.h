// SPDX-License-Identifier: Apache-2.0
// The arguments of the NVLink transport's kernels. Addresses are integers, so this header needs no CUDA.
//
// Letters in names: T tokens of this rank, K choices of a token, H hidden size, W ranks, E experts of one rank, S rows
// that this rank sends, R rows that it receives, P expert-sorted rows with their padding. A suffix such as "ERH" gives
// the axes of a tensor. "Output" marks what a kernel writes.
//
// A chunk is a run of neighboring tokens of one rank. One team of threads sends a chunk at a time, and one flag
// announces it. A row's place is its index among the P rows of its expert's rank.
#pragma once
#include <cstdint>

namespace nvlink {

constexpr int MAX_RANKS = 8;
constexpr int MAX_CHUNKS = 1024;   // of one rank's tokens
constexpr int MAX_CHOICES = 32;    // one for each lane of a warp
constexpr int ROW_ALIGNMENT = 128; // each expert's rows are padded to a multiple of this

using Address = uint64_t;

// The header of a rank's staging, as offsets of its tables in bytes. Two halves follow the header. Exchanges use the
// halves in turn. A call is a number of 64 bits: the epoch of an exchange, and its signature << 32.
struct Staging {
  static constexpr int64_t ACKS = 0;    // u32 [W]: the last exchange whose data each peer has finished reading
  static constexpr int64_t CALLS = 128; // u64 [2][W]: the call that each peer makes
  static constexpr int64_t FLAGS = 256; // u64 [W][MAX_CHUNKS]: the call in which each chunk of a rank became complete
  static constexpr int64_t HALVES = FLAGS + 8ll * MAX_RANKS * MAX_CHUNKS;
};

enum Kind : uint32_t {
  COUNTS = 1,
  PLACES = 2,
  DISPATCH = 3,
  COMBINE = 4,
  LOW_LATENCY_DISPATCH = 5,
  LOW_LATENCY_COMBINE = 6,
  ROWS = 7
};
enum Code : uint32_t { TIMEOUT = 1, MISMATCH = 2, OVERFLOW = 3 };
enum Dtype : int { BF16 = 0, FP16 = 1, FP32 = 2 };

// Why an exchange failed. It lies in host memory. The device writes it, and writes `code` last.
struct Failure {
  uint32_t code, rank, peer, phase, epoch;
  uint32_t detail; // for a MISMATCH the peer's signature, for an OVERFLOW the number of rows
};

// The state of exchanges, in this device's memory. Only kernels of this device access it.
struct State {
  uint32_t epoch;                           // number of the next exchange
  uint32_t teams_begun, teams_finished;     // teams that have begun this exchange, and that have finished it
  uint32_t sends_claimed, receives_claimed; // items of this exchange that teams have claimed
  uint32_t failed;                          // whether an exchange has failed
};
constexpr int STATE_WORDS = sizeof(State) / 4;

// The group of ranks, and the exchange that a kernel takes part in.
struct Group {
  Address peer[MAX_RANKS] = {}; // each rank's staging, as this rank addresses it
  Address state = 0, failure = 0;
  int rank = 0, world = 0;
  int64_t half_bytes = 0;
  uint64_t timeout_ns = 0;
  uint32_t signature = 0; // the kind in the low byte, a hash of the shapes above it. Must be equal on all ranks
};

// Counts, for each chunk, this rank's choices for each expert and its tokens for each rank.
struct Count {
  Address expert_TK = 0; // int64 ids of experts of all ranks. -1 marks a dropped choice
  Address first_CB = 0;  // output, int32 [experts + W, stride]
  int64_t T = 0;
  int K = 0, experts = 0, local_experts = 0, world = 0, chunk = 0, chunks = 0, stride = 0;
};

// Adds up the counts, sends them to every peer and waits for theirs. A rank's row of counts consists of T, the number
// of chunks, the rows for each rank, and the choices for each expert.
struct Totals {
  Group group;
  Address first_CB = 0;      // the counts. Output: how many come before each chunk, and at [chunks] the total
  Address counts_WC = 0;     // output, int32 [W, 2 + W + experts]: every rank's row of counts
  Address place_base_E = 0;  // output, int32 [experts]: the place of this rank's first row for each expert
  Address place_end_E = 0;   // output, int32 [experts]: where the places of this rank's rows for each expert end
  Address segments = 0;      // output, int32 [4, W]: see Segments
  Address group_ends_E = 0;  // output, int32 [local_experts]
  Address group_sizes_E = 0; // output, int32 [local_experts]
  // Output, int32 [1 + W * (2 + W + experts) + local_experts] in host memory: `serial`, counts_WC, group_sizes_E. The
  // kernel writes `serial` last. The address is 0 if the host does not wait.
  Address host = 0;
  // int64 [1] in host memory: the number of choices for this rank's experts that did not fit is added to it. If the
  // address is 0, rows that do not fit are an error.
  Address dropped = 0;
  int64_t T = 0;
  int64_t most_rows = 0; // the capacity of P, a multiple of ROW_ALIGNMENT. 0 sets no limit
  int experts = 0, local_experts = 0, chunks = 0, stride = 0, serial = 0;
};

// The rows of Totals::segments. Each has an entry for each rank w.
enum Segments {
  RECV_BASE = 0,      // where the rows of w begin among the R rows of this rank
  SEND_BASE = 1,      // where the rows for w begin among the S rows of this rank
  PEER_RECV_BASE = 2, // where the rows of this rank begin among the R rows of w
  PEER_SEND_BASE = 3  // where the rows for this rank begin among the S rows of w
};

// Finds the place of each choice and sends it to the choice's rank.
struct Places {
  Group group;
  Address expert_TK = 0, first_CB = 0, counts_WC = 0, place_base_E = 0, segments = 0;
  Address place_end_E = 0; // choices that have no place before it are dropped. The address is 0 if all rows fit
  Address slot_WT = 0;  // output, int32 [W, T]: a token's index among the rows sent to a rank. -1 if it is not sent
  Address place_RK = 0; // output, int32 [R, K]: the place of each choice. -1 if another rank serves it, or none does
  // Output, int32 [W, MAX_CHUNKS, 2]: the first row of each chunk among the rows of its rank, and its number of rows.
  Address arriving_WC = 0;
  int64_t T = 0, places_at = 0, ranges_at = 0; // *_at: offsets in a half, in bytes
  int K = 0, experts = 0, local_experts = 0, chunk = 0, chunks = 0, stride = 0;
};

// The arguments of both dispatch and combine.
struct Rows {
  Group group;
  Address slot_WT = 0, place_RK = 0, arriving_WC = 0, first_CB = 0, counts_WC = 0, segments = 0;
  int64_t T = 0, P = 0;
  int64_t data_at = 0, scale_at = 0, weight_at = 0; // offsets in a half, in bytes
  int K = 0, experts = 0, chunk = 0, chunks = 0, stride = 0;
  int H = 0;
  int block = 0;     // values that share a scale. 0 if rows travel unquantized
  int floor = 0;     // whether scales are rounded by "floor". Otherwise "rceil"
  int scale_row = 0; // bytes of a row's scales in staging
  int weights = 0;   // whether K weights travel with each row. Their addresses are 0 if there are no rows
};

struct Dispatch {
  Rows rows;
  Address x_TH = 0, weight_TK = 0;
  Address out_PH = 0, out_scale = 0, out_weight_P = 0;
  Address group_ends_E = 0, group_sizes_E = 0;
  int64_t scale_stride_p = 0, scale_stride_b = 0; // bytes in out_scale from row to row, and from block to block
  int dtype = 0, local_experts = 0;
};

struct Combine {
  Rows rows;
  Address y_PH = 0, weight_P = 0;
  Address out_TH = 0, out_weight_TK = 0;
  int dtype = 0;     // of y_PH: out_dtype, or FP32
  int out_dtype = 0; // of out_TH, and of rows that travel unquantized
};

// The arguments of both dispatch and combine at low latency. Each of the two is one kernel, and no size depends on the
// routing: every expert has room for every token of every rank.
struct LowLatency {
  Group group;
  Address index_TK = 0; // ids of experts. A choice with any other id is dropped
  Address bound = 0;    // uint32 [1]: only the first `bound` of the T tokens exist. The address is 0 if all exist
  // int32 [W, max_tokens, K]: the row of each choice that this rank serves, and -1 for other choices. Behind it lies
  // int32 [W]: the number of tokens of each rank.
  Address routes = 0;
  // What one rank sends to another in an exchange is a message. It takes `message` bytes, and arrives at `lands_at` in
  // a half. If it is put from here, the messages for all ranks lie one after the other at `outbox_at` in a half.
  int64_t message = 0, lands_at = 0, outbox_at = 0;
  int64_t record = 0;   // bytes from one token of a dispatch to the next
  int64_t count_at = 0; // where the counts lie in the message
  int scale_at = 0, route_at = 0; // where a token's scales and its route lie in its record, behind its row
  int T = 0, K = 0, experts = 0, local_experts = 0, max_tokens = 0, H = 0;
  int index_bytes = 8;       // of one id: 4 or 8
  int send = 1, receive = 1; // which parts of the exchange this kernel carries out
  int crew = 1;              // warps that move a row together: 1, or all warps of a block
};

// How scales travel, and how they are stored in out_scale.
enum ScaleKind : int {
  BYTES = 0,          // one byte each
  WORDS = 1,          // four bytes each
  BYTES_TO_FLOATS = 2 // travel as E8M0 bytes and are stored as float32
};

struct LowLatencyDispatch {
  LowLatency common;
  Address x_TH = 0;
  Address scale_in = 0;           // scales of rows that come quantized, scale_row bytes a row. Otherwise 0
  Address out_ERH = 0, out_scale = 0, out_count_E = 0;
  int64_t scale_strides[3] = {};  // of out_scale [local_experts, max_tokens * W, scales], in bytes
  int row_bytes = 0;              // of a row as it travels
  int dtype = 0;                  // of x_TH, if this kernel quantizes it
  int block = 0;                  // values that share a scale. 0 if rows travel as they are
  int floor = 0;                  // as Rows::floor
  int scale_row = 0;              // bytes of a row's scales in staging, a multiple of 4
  int scales = 0, scale_kind = 0; // of a row in out_scale
};

struct LowLatencyCombine {
  LowLatency common;
  Address y_ERH = 0, weight_TK = 0, out_TH = 0;
  int dtype = 0;     // of y_ERH
  int out_dtype = 0; // of out_TH, and of the rows that travel
};

// An all-to-all of rows, as bytes. Each rank of the group sends a run of neighboring rows to every rank. A half has a
// region of `region` bytes for each rank that sends.
struct RowExchange {
  Group group;
  Address x = 0, out = 0;              // rows, and output: rows that arrive, in rank order
  Address rows = 0;                    // int64: which rows of x are sent, in rank order. 0: all of them, in this order
  Address other_state = 0;             // State of another hop. If an exchange of it has failed, this one does nothing
  // Where the rows for each rank begin among those that are sent, in bytes, and where the last ones end.
  int64_t send_at[MAX_RANKS + 1] = {};
  int64_t recv_at[MAX_RANKS + 1] = {}; // the same for out
  int64_t row = 0;                     // bytes of a row
  int64_t region = 0, chunk = 0;       // bytes. `chunk`: what one flag announces. Both must be equal on all ranks
  int chunks = 0;                      // most chunks between two ranks. Equal on all ranks
};

// Launch a kernel on the current device. `sms`: how many multiprocessors it takes. `stream`: a cudaStream_t. They
// return a cudaError_t, which is 0 without an error.
int launch(const Count &, Address stream);
int launch(const Totals &, Address stream);
int launch(const Places &, int sms, Address stream);
int launch(const Dispatch &, int sms, Address stream);
int launch(const Combine &, int sms, Address stream);
int launch(const LowLatencyDispatch &, int sms, Address stream);
int launch(const LowLatencyCombine &, int sms, Address stream);
int launch(const RowExchange &, int sms, Address stream);
// Whether a block has enough shared memory for the kernels `totals` and `places`. `experts`: of all ranks. `chunk`:
// tokens of a chunk.
bool fits(int world, int experts, int K, int chunk);
// Load all kernels of a file into device memory. CUDA would otherwise load a kernel at its first launch, and wait for
// running kernels first. Those may wait for a peer.
int load_route();
int load_dispatch();
int load_combine();
int load_low_latency();
int load_row_exchange();

} // namespace nvlink
