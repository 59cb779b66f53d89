// SPDX-License-Identifier: Apache-2.0
// The arguments of the kernels that exchange over NVSHMEM. The structs and the letters are those of
// ../nvlink/kernels.h. This header needs neither CUDA nor NVSHMEM.
//
// The staging lies in the symmetric heap, and has the same place at all PEs. Group::peer[0] is this rank's own. In an
// exchange of rows, a half has two regions for each rank of the hop: for the rows that it sends, and for the rows that
// are on their way to it. In the low-latency exchange, rank i is PE i, and there are up to MAX_PES.
#pragma once
#include "../nvlink/kernels.h"

namespace nvshmem {

using namespace nvlink;

constexpr int MAX_PES = 32;

// As nvlink::Staging. Signals are u64. A network may deliver a signal after a later one of the same kernel or of the
// next exchange. So the flags of one exchange are apart from those of the next, as its half of the staging is, and
// acknowledgements are counted.
struct ShmemStaging {
  static constexpr int64_t ACKS = 0;    // u64 [W]: the exchanges that each peer has finished reading; the low 32 bits
  static constexpr int64_t FLAGS = 512; // u64 [2][W][MAX_CHUNKS]: the call in which each chunk of a rank was complete
  static constexpr int64_t HALVES = FLAGS + 2 * 8ll * MAX_PES * MAX_CHUNKS;
};

struct ShmemExchange {
  RowExchange rows;
  int pe[MAX_RANKS] = {}; // the PE of each rank of the hop
};

// As in ../nvlink/kernels.h.
int launch(const ShmemExchange &, int sms, Address stream);
int launch(const LowLatencyDispatch &, int sms, Address stream);
int launch(const LowLatencyCombine &, int sms, Address stream);
int load_row_exchange();
int load_low_latency();

} // namespace nvshmem
