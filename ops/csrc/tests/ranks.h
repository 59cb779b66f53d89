// SPDX-License-Identifier: Apache-2.0
// The ranks that MPI starts, or those of one hop, and the staging that their kernels share.
#pragma once
#include "device.h"
#include <string>

// "Collective": all ranks call it, also where it is about some of them.
class Ranks {
public:
  // All ranks. Collective. `half_bytes`: of the staging. `seconds`: the deadline of every wait on the device.
  // Throws std::runtime_error.
  Ranks(int64_t half_bytes, double seconds);
  // Some of `all`, this rank among them, with a staging of their own, which no other rank maps. Collective. `ids`:
  // their ranks in `all`, ascending.
  Ranks(const Ranks &all, std::vector<int> ids, int64_t half_bytes);
  ~Ranks();
  Ranks(const Ranks &) = delete;

  std::vector<int> ids;    // of each of them among all ranks
  int rank = 0, world = 0; // this rank among them, and how many they are
  int sharing = 0;         // the most ranks that use the same device
  double seconds;
  nvlink::Failure *failure = nullptr; // what the kernels recorded. Its `code` is 0 without a failure

  // The kernels' group. `shape`: must be equal on all ranks.
  nvlink::Group group(nvlink::Kind kind, const std::string &shape) const;
  // Waits until the device is done. Throws if an exchange failed. A device that is not done some seconds after the
  // deadline ends the program on all ranks.
  void wait(const std::string &what) const;
  // What the kernels recorded, in one line.
  std::string described(const nvlink::Failure &failure) const;
  // Collective. Makes the next exchange number `epoch`, and forgets failures.
  void restart(uint32_t epoch);
  // Collective. The error of the lowest rank that has one, or "".
  std::string first_error(const std::string &mine) const;
  // Collective. The largest of the ranks' numbers.
  double largest(double mine) const;
  void barrier() const;

  // Throws if a half of the staging has less room than `bytes`.
  void need(int64_t bytes) const;
  // Of the kernels' State.
  nvlink::Address state_address() const { return state.address(); }

private:
  void share(); // Collective. Allocates the staging and maps that of the others

  int64_t half_bytes;
  void *staging = nullptr;
  std::vector<void *> mapped;
  nvlink::Address peers[nvlink::MAX_RANKS] = {};
  device::Array<uint32_t> state;
};
