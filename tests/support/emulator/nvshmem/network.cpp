// SPDX-License-Identifier: Apache-2.0
// The network of the emulated NVSHMEM. Messages take different times, some of them longer than an exchange: a signal
// comes behind the data of its own message, and may come before an earlier signal. Data are read when they arrive, the
// latest moment that NVSHMEM allows.
#include "nvshmem.h"
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <unistd.h>

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

constexpr int USUAL_US = 200, LATE_US = 4000, LATE = 16; // one in 16 messages is late

struct Message {
  char *to;
  const char *from;
  size_t bytes;
  uint64_t *signal;
  uint64_t value;
  bool add;

  void arrive() const {
    std::memcpy(to, from, bytes);
    if (add)
      __atomic_fetch_add(signal, value, __ATOMIC_RELEASE);
    else
      __atomic_store_n(signal, value, __ATOMIC_RELEASE);
  }
};

class Network {
public:
  Network() : random(unsigned(getpid())) { std::thread(&Network::run, this).detach(); }
  void send(const Message &message) {
    std::lock_guard lock(mutex);
    const int most = random() % LATE ? USUAL_US : LATE_US;
    on_their_way.emplace(Clock::now() + microseconds(random() % most), message);
    changed.notify_all();
  }
  // Waits until all messages have arrived.
  void drain() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return on_their_way.empty(); });
  }

private:
  void run() {
    std::unique_lock lock(mutex);
    while (true) {
      if (on_their_way.empty()) {
        changed.wait(lock);
      } else if (const auto due = on_their_way.begin()->first; due > Clock::now()) {
        changed.wait_until(lock, due);
      } else {
        on_their_way.begin()->second.arrive();
        on_their_way.erase(on_their_way.begin());
        changed.notify_all();
      }
    }
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::minstd_rand random;
  std::multimap<Clock::time_point, Message> on_their_way; // by when they arrive
};

Network &network() {
  static Network &network = *new Network; // its thread ends with the process
  return network;
}

struct Heap {
  uint64_t bytes;
  std::map<int, char *> of_pe;
};

std::map<const char *, Heap> heaps; // by this process's own address
std::mutex mutex;
std::atomic<uint64_t> number_of_puts = 0;

// The address in PE `pe`'s memory that corresponds to one in this process's. Ends the launch if there is none.
void *mapped(const void *address, int pe, emulator::Site site) {
  const char *at = static_cast<const char *>(address);
  std::unique_lock lock(mutex);
  for (const auto &[own, heap] : heaps)
    if (at >= own && at < own + heap.bytes && heap.of_pe.count(pe))
      return heap.of_pe.at(pe) + (at - own);
  lock.unlock();
  emulator::fault("an address outside of the symmetric heap, or a PE of another hop", site);
}

} // namespace

void nvshmem_emulated_send(void *to, const void *from, size_t bytes, uint64_t *signal, uint64_t value, int operation,
                           int pe, emulator::Site site) {
  number_of_puts += operation != NVSHMEM_SIGNAL_ADD;
  network().send({static_cast<char *>(mapped(to, pe, site)), static_cast<const char *>(from), bytes,
                  static_cast<uint64_t *>(mapped(signal, pe, site)), value, operation == NVSHMEM_SIGNAL_ADD});
}

// Tests tell where the PEs' memory is mapped. Before they unmap it, they wait for all messages.
extern "C" __attribute__((visibility("default"))) void emulator_heap(char *own, uint64_t bytes, int pe, char *mapped) {
  std::lock_guard lock(mutex);
  heaps[own].bytes = bytes;
  heaps[own].of_pe[pe] = mapped;
}

extern "C" __attribute__((visibility("default"))) void emulator_drain() { network().drain(); }

// How often this process has put something into another PE's memory.
extern "C" __attribute__((visibility("default"))) uint64_t emulator_puts() { return number_of_puts; }
