// SPDX-License-Identifier: Apache-2.0
// The ranks that MPI starts, and the staging that their kernels share.
#pragma once
#include "cuda.h"

class Ranks {
public:
  // Collective. `half_bytes`: of the staging. `seconds`: the deadline of every wait on the device. Throws
  // std::runtime_error.
  Ranks(int64_t half_bytes, double seconds);
  ~Ranks();
  Ranks(const Ranks &) = delete;

  int rank = 0, world = 0; // this rank, and how many they are
  int sharing = 0;         // the most ranks that use the same device
  std::string device_name;
  double seconds;

  // The kernels' group. `shape`: must be equal on all ranks.
  nvlink::Group group(nvlink::Kind kind, const std::string &shape) const;
  // Waits until the device is done. Throws if an exchange failed. A device that is not done some seconds after the
  // deadline ends the program on all ranks.
  void wait(const std::string &what) const;
  // Throws if a half of the staging has less room than `bytes`.
  void need(int64_t bytes) const;
  // Collective. The error of the lowest rank that has one, or "".
  std::string first_error(const std::string &mine) const;
  // Collective. The largest of the ranks' numbers.
  double largest(double mine) const;

private:
  int64_t half_bytes;
  void *staging = nullptr;
  std::vector<void *> mapped;
  nvlink::Address peers[nvlink::MAX_RANKS] = {};
  nvlink::Failure *failure = nullptr; // what the kernels recorded. Its `code` is 0 without a failure
  Array<uint32_t> state;
};
