// SPDX-License-Identifier: Apache-2.0
// The arguments of the kernel that exchanges rows over NVSHMEM. The structs, the letters and the header of the staging
// are those of ../nvlink/kernels.h. This header needs neither CUDA nor NVSHMEM.
//
// The staging lies in the symmetric heap: Group::peer[rank] is this rank's own, and has the same place at all PEs. In
// the header, acknowledgements are u64 here, since signals are. A half has two regions for each rank of the hop: for
// the rows that it sends, and for the rows that are on their way to it.
#pragma once
#include "../nvlink/kernels.h"

namespace nvshmem {

using namespace nvlink;

struct ShmemState {
  State exchanges;
  uint64_t puts; // how many times this device has put rows into another PE's memory
};
constexpr int SHMEM_STATE_WORDS = sizeof(ShmemState) / 4;

struct ShmemExchange {
  RowExchange rows;
  int pe[MAX_RANKS] = {}; // the PE of each rank of the hop
};

// As in ../nvlink/kernels.h.
int launch(const ShmemExchange &, int sms, Address stream);
int load_row_exchange();

} // namespace nvshmem
