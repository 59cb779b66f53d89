// SPDX-License-Identifier: Apache-2.0
// Launches, blocks and fibers of cuda_emulator.h.
#include "cuda_emulator.h"
#include <algorithm>
#include <atomic>
#include <chrono>
#include <csetjmp>
#include <map>
#include <memory>
#include <mutex>
#include <semaphore>
#include <stdexcept>
#include <sys/mman.h>
#include <thread>
#include <ucontext.h>
#include <vector>

namespace emulator {

constinit thread_local const Coordinates *here = nullptr;

namespace {

constexpr int MOST_RESIDENT = 6;                // blocks at a time
constexpr std::size_t STACK = 64 << 10, GUARD = 4 << 10;
constexpr std::size_t MARGIN = 1 << 10;         // poisoned bytes on either side of dynamic shared memory
constexpr unsigned YIELD = 32;                  // one in 32 accesses to memory lets other fibers run
constexpr auto DEADLINE = std::chrono::seconds(60);
constexpr auto NAP = std::chrono::microseconds(20); // when all fibers wait for other processes

constexpr unsigned DELIVER = 4; // with an adversary, one in 4 waits brings a signal that is on its way

std::atomic<uint64_t> next_seed = 1;
std::atomic<bool> adversary = false;

struct Random { // xorshift64*
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed * 0x9E3779B97F4A7C15ull | 1) {
    for (int i = 0; i < 4; i++)
      below(1);
  }
  unsigned below(std::size_t n) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return unsigned((state * 0x2545F4914F6CDD1Dull >> 32) % n);
  }
};

// Stacks outlive launches: most of a fiber's cost is the first touch of its memory.
class Stacks {
public:
  char *take() {
    {
      std::lock_guard lock(mutex);
      if (!free.empty()) {
        char *stack = free.back();
        free.pop_back();
        return stack;
      }
    }
    void *memory = mmap(nullptr, GUARD + STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, GUARD, PROT_NONE))
      std::abort();
    return static_cast<char *>(memory) + GUARD;
  }
  void give(char *stack) {
    std::lock_guard lock(mutex);
    free.push_back(stack);
  }

private:
  std::mutex mutex;
  std::vector<char *> free;
} stacks;

struct Put {
  void *to;
  int4 value;
  unsigned thread, warp_turn; // who stores, and after how many collectives of its warp
};

struct Signal { // and the stores that come between the team's signal before it and this one
  std::vector<Put> puts;
  const void *team; // that sends it
  uint64_t order;   // among the signals of the launch
  void *to;
  uint64_t value;
  std::size_t bytes;
};

void store(std::vector<Put> &puts, Random &random) {
  for (; !puts.empty(); puts.pop_back()) {
    std::swap(puts[random.below(puts.size())], puts.back());
    std::memcpy(puts.back().to, &puts.back().value, sizeof(int4));
  }
}

void store(Signal &signal, Random &random) {
  store(signal.puts, random);
  if (signal.bytes == 4)
    __atomic_store_n(static_cast<uint32_t *>(signal.to), uint32_t(signal.value), __ATOMIC_RELEASE);
  else
    __atomic_store_n(static_cast<uint64_t *>(signal.to), signal.value, __ATOMIC_RELEASE);
}

struct Launch {
  dim3 grid, block;
  std::size_t shared_bytes;
  const std::function<void()> &kernel;
  uint64_t seed;
  std::chrono::steady_clock::time_point end = std::chrono::steady_clock::now() + DEADLINE;
  std::atomic<bool> stopped = false;
  std::mutex mutex;
  std::string fault = {}; // the first
  std::vector<Signal> on_their_way = {};
  uint64_t signals = 0; // so far

  // Stores one of the signals that are on their way, if there is one.
  bool deliver(Random &random) {
    std::lock_guard lock(mutex);
    if (on_their_way.empty())
      return false;
    std::swap(on_their_way[random.below(on_their_way.size())], on_their_way.back());
    Signal &signal = on_their_way.back();
    for (Signal &other : on_their_way) // another warp may have signalled between two stores of this one
      if (other.team == signal.team && other.order < signal.order)
        store(other.puts, random);
    store(signal, random);
    on_their_way.pop_back();
    return true;
  }
  void fail(const std::string &what) {
    std::lock_guard lock(mutex);
    if (!stopped.exchange(true))
      fault = what;
  }
};

struct Fiber {
  Coordinates at;
  jmp_buf context;
  char *stack = nullptr;
  bool started = false;
  const char *where = "at its beginning"; // what it does at `site`
  Site site = {};
};

struct Warp {
  uint64_t values[2][32]; // of this collective and the one before, which some lanes have yet to read
  unsigned arrived = 0, turn = 0;
  const char *what = nullptr;
  Site site = {};
};

std::string text(const Site &site) {
  const std::string file = site.file_name();
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(site.line());
}

bool same(const Site &a, const Site &b) {
  return a.line() == b.line() && a.column() == b.column() && !std::strcmp(a.file_name(), b.file_name());
}

struct Barrier {
  unsigned arrived = 0, turn = 0;
  bool voted[2] = {}; // at this turn and the one before, of which some threads have yet to read
  Site site = {};
};

struct Block {
  Launch &launch;
  unsigned index;
  Random random;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<Fiber *> ready;
  std::vector<Barrier> barriers; // of the block, then of each team
  std::vector<std::vector<Put>> puts; // of each team, that have not happened yet
  std::vector<std::size_t> before_barrier; // how many of them come before the team's last barrier
  unsigned idle = 0;
  std::size_t left;
  std::vector<char> shared;
  Fiber *current = nullptr;
  jmp_buf scheduler;

  Block(Launch &launch, unsigned index)
      : launch(launch), index(index), random(launch.seed * 1000003 + index), fibers(launch.block.x * launch.block.y),
        warps(fibers.size() / 32), barriers(1 + launch.block.y), puts(launch.block.y), before_barrier(launch.block.y),
        left(fibers.size()), shared(launch.shared_bytes + 2 * MARGIN, char(POISON)) {}

  void run();
  void resume(Fiber &fiber);
  [[noreturn]] void leave() { _longjmp(scheduler, 1); }
  void suspend() {
    if (_setjmp(current->context) == 0)
      leave();
  }
  void fail(const std::string &what) { launch.fail(what + "\n" + positions()); }
  std::string positions() const;
  bool margins_intact() const {
    const auto poisoned = [](char c) { return c == char(POISON); };
    return std::all_of(shared.begin(), shared.begin() + MARGIN, poisoned) &&
           std::all_of(shared.end() - MARGIN, shared.end(), poisoned);
  }
};

constinit thread_local Block *block = nullptr;

void enter() {
  block->launch.kernel();
  Fiber &fiber = *block->current;
  fiber.where = "has left the kernel";
  fiber.site = {};
  block->left--;
  block->idle = 0;
  block->leave();
}

void Block::resume(Fiber &fiber) {
  current = &fiber;
  here = &fiber.at;
  if (_setjmp(scheduler))
    return;
  if (fiber.started)
    _longjmp(fiber.context, 1);
  fiber.started = true;
  fiber.where = "runs";
  fiber.stack = stacks.take();
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack;
  context.uc_stack.ss_size = STACK;
  context.uc_link = nullptr;
  makecontext(&context, enter, 0);
  setcontext(&context);
}

void Block::run() {
  block = this;
  for (unsigned i = 0; i < fibers.size(); i++) {
    fibers[i].at = {{i % launch.block.x, i / launch.block.x, 0}, {index, 0, 0}, launch.block, launch.grid};
    ready.push_back(&fibers[i]);
  }
  while (left && !launch.stopped) {
    if (ready.empty()) {
      fail("no thread of block " + std::to_string(index) + " can go on");
      break;
    }
    if (idle > ready.size()) {
      if (std::chrono::steady_clock::now() > launch.end) {
        fail("no end after " + std::to_string(DEADLINE.count()) + " s");
        break;
      }
      std::this_thread::sleep_for(NAP);
      idle = 0;
    }
    std::swap(ready[random.below(ready.size())], ready.back());
    Fiber *next = ready.back();
    ready.pop_back();
    resume(*next);
  }
  for (auto &of_team : puts)
    store(of_team, random);
  if (!left && !margins_intact())
    fail("block " + std::to_string(index) + " wrote outside of its dynamic shared memory");
  for (Fiber &fiber : fibers)
    if (fiber.stack)
      stacks.give(fiber.stack);
}

std::string Block::positions() const {
  std::map<std::string, std::string> threads;
  for (std::size_t i = 0, begin = 0; i <= fibers.size(); i++) {
    const auto where = [&](std::size_t n) {
      const Fiber &f = fibers[n];
      return std::string(f.where) + (f.site.line() ? " (" + text(f.site) + ")" : "");
    };
    if (i > 0 && (i == fibers.size() || where(i) != where(begin))) {
      std::string &list = threads[where(begin)];
      list += (list.empty() ? "" : ", ") + std::to_string(begin);
      if (i - begin > 1)
        list += "-" + std::to_string(i - 1);
      begin = i;
    }
  }
  std::string all = "Of block " + std::to_string(index) + " of " + std::to_string(launch.grid.x) + ":";
  for (const auto &[where, list] : threads)
    all += "\n  " + where + ": threads " + list;
  return all;
}

} // namespace

void launch(dim3 grid, dim3 block_size, std::size_t shared_bytes, cudaStream_t, const std::function<void()> &kernel) {
  const unsigned threads_of_block = block_size.x * block_size.y;
  if (grid.x == 0 || grid.y * grid.z * block_size.z != 1 || block_size.x % 32 || threads_of_block == 0 ||
      threads_of_block > 1024 || shared_bytes > 227 << 10)
    throw std::runtime_error("a launch of " + std::to_string(grid.x) + " blocks of " + std::to_string(threads_of_block) +
                             " threads with " + std::to_string(shared_bytes) + " bytes of shared memory");
  Launch launch{grid, block_size, shared_bytes, kernel, next_seed++};
  std::counting_semaphore<> room(1 + Random(launch.seed).below(std::min<unsigned>(grid.x, MOST_RESIDENT)));
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < grid.x; i++) {
    room.acquire();
    threads.emplace_back([&launch, &room, i] {
      std::make_unique<Block>(launch, i)->run();
      room.release();
    });
  }
  for (std::thread &thread : threads)
    thread.join();
  for (Random random(launch.seed); launch.deliver(random);) {
  }
  if (launch.stopped)
    throw std::runtime_error("CUDA emulator: " + launch.fault);
}

namespace {

bool sync(Barrier &barrier, std::size_t first, std::size_t members, const char *what, Site site, bool vote) {
  Block &b = *block;
  if (barrier.arrived && !same(barrier.site, site))
    fault(std::string(what) + ", while others wait in that at " + text(barrier.site), site);
  barrier.site = site;
  const bool &voted = barrier.voted[barrier.turn & 1] |= vote;
  b.current->where = what;
  b.current->site = site;
  b.idle = 0;
  if (++barrier.arrived == members) {
    barrier.arrived = 0;
    barrier.voted[++barrier.turn & 1] = false;
    for (std::size_t team = first / here->block_dim.x; team * here->block_dim.x < first + members; team++)
      b.before_barrier[team] = b.puts[team].size();
    for (std::size_t i = first; i < first + members; i++) {
      b.fibers[i].where = "runs, last seen";
      b.ready.push_back(&b.fibers[i]);
    }
  }
  b.suspend();
  return voted;
}

} // namespace

bool sync_block(Site site, bool vote) {
  return sync(block->barriers[0], 0, block->fibers.size(), "__syncthreads", site, vote);
}

bool sync_team(Site site, bool vote) {
  const unsigned team = here->thread.y, threads = here->block_dim.x;
  return sync(block->barriers[1 + team], team * threads, threads, "a team's barrier", site, vote);
}

namespace {

unsigned this_thread() { return here->thread.y * here->block_dim.x + here->thread.x; }

} // namespace

const uint64_t *collective(const char *what, unsigned mask, uint64_t value, Site site) {
  Block &b = *block;
  const unsigned thread = this_thread();
  Warp &warp = b.warps[thread / 32];
  if (mask != ~0u)
    fault(std::string(what) + " with a mask: the emulator knows none", site);
  if (warp.arrived && (std::strcmp(warp.what, what) || !same(warp.site, site)))
    fault(std::string(what) + ", while other lanes wait in " + warp.what + " at " + text(warp.site), site);
  warp.what = what;
  warp.site = site;
  warp.values[warp.turn & 1][thread % 32] = value;
  warp.arrived |= 1u << thread % 32;
  const uint64_t *values = warp.values[warp.turn & 1];
  b.current->where = what;
  b.current->site = site;
  b.idle = 0;
  if (warp.arrived == ~0u) {
    warp.arrived = 0;
    warp.turn++;
    for (unsigned i = 0; i < 32; i++) {
      Fiber &fiber = b.fibers[thread / 32 * 32 + i];
      fiber.where = "runs, last seen";
      b.ready.push_back(&fiber);
    }
  }
  b.suspend();
  return values;
}

void put(void *to, int4 value) {
  const unsigned thread = this_thread();
  if (adversary)
    block->puts[here->thread.y].push_back({to, value, thread, block->warps[thread / 32].turn});
  else
    std::memcpy(to, &value, sizeof value);
}

// A signal comes after the stores of its own thread, and after those that a barrier or a collective of the warp has put
// before it. The others of its team may come later: their own signal does not order this one.
void signal(void *to, uint64_t value, std::size_t bytes) {
  Block &b = *block;
  Signal signal{{}, &b.puts[here->thread.y], 0, to, value, bytes};
  if (!adversary)
    return store(signal, b.random);
  auto &puts = b.puts[here->thread.y];
  std::size_t &ordered = b.before_barrier[here->thread.y];
  const unsigned thread = this_thread(), turn = b.warps[thread / 32].turn;
  const auto later = [&](const Put &put) {
    return put.thread != thread && (put.thread / 32 != thread / 32 || put.warp_turn == turn);
  };
  const auto rest = std::stable_partition(puts.begin() + ordered, puts.end(), [&](const Put &p) { return !later(p); });
  signal.puts.assign(puts.begin(), rest);
  puts.erase(puts.begin(), rest);
  ordered = 0;
  std::lock_guard lock(b.launch.mutex);
  signal.order = b.launch.signals++;
  b.launch.on_their_way.push_back(std::move(signal));
}

void settle() {
  Block &b = *block;
  std::vector<Put> &puts = b.puts[here->thread.y];
  store(puts, b.random);
  b.before_barrier[here->thread.y] = 0;
  std::lock_guard lock(b.launch.mutex);
  for (Signal &signal : b.launch.on_their_way)
    if (signal.team == &puts)
      store(signal.puts, b.random);
}

void spin(Site site) {
  Block &b = *block;
  if (adversary && !b.random.below(DELIVER))
    b.launch.deliver(b.random);
  b.current->where = "runs, last seen";
  b.current->site = site;
  b.idle++;
  b.ready.push_back(b.current);
  b.suspend();
}

void maybe_yield(Site site) {
  Block &b = *block;
  if (b.random.below(YIELD))
    return;
  b.current->where = "runs, last seen";
  b.current->site = site;
  b.idle = 0;
  b.ready.push_back(b.current);
  b.suspend();
}

void fault(const std::string &what, Site site) {
  Block &b = *block;
  b.current->where = "stopped here";
  b.current->site = site;
  b.fail("thread " + std::to_string(b.current - b.fibers.data()) + " at " + text(site) + ": " + what);
  b.leave();
}

void *dynamic_shared_bytes() { return block->shared.data() + MARGIN; }

} // namespace emulator

// Seeds this process's next launches, so that ranks differ in the order in which things happen.
extern "C" __attribute__((visibility("default"))) void emulator_seed(uint64_t seed) { emulator::next_seed = seed << 32; }

extern "C" __attribute__((visibility("default"))) void emulator_adversary(bool on) { emulator::adversary = on; }

extern "C" cudaError_t cudaGetLastError() { return cudaSuccess; }
extern "C" const char *cudaGetErrorString(cudaError_t) { return "an error that the emulator does not know"; }
