// Launching: workers, their memory, and the threads they run on.
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <memory>
#include <system_error>
#include <thread>

#include "worker.h"

namespace simt {

// --- where the kernel's code and variables lie

bool Image::contains(const void* address) const {
  const char* place = static_cast<const char*>(address);
  for (const Segment& segment : segments) {
    if (place >= segment.low && place < segment.high) {
      return true;
    }
  }
  return false;
}

u64 Image::site(const void* address) const {
  return contains(address) ? static_cast<u64>(static_cast<const char*>(address) - base) : 0;
}

struct ImageSearch {
  const void* inside;
  Image image;
};

static int look_at_library(dl_phdr_info* info, size_t, void* data) {
  ImageSearch& search = *static_cast<ImageSearch*>(data);
  Image image;
  image.base = reinterpret_cast<char*>(info->dlpi_addr);
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type == PT_LOAD) {
      char* low = image.base + header.p_vaddr;
      image.segments.push_back({low, low + header.p_memsz, (header.p_flags & PF_W) != 0});
    }
  }
  if (!image.contains(search.inside)) {
    return 0;
  }
  search.image = std::move(image);
  return 1;
}

static Image image_of(const void* address) {
  ImageSearch search{address, {}};
  dl_iterate_phdr(look_at_library, &search);
  return std::move(search.image);
}

// --- a worker's memory

constexpr u64 fiber_stack_bytes = 256 * 1024;  // address space; a page becomes memory when a thread touches it

Worker::Worker(bool checking) {
  if (checking) {
    checker = make_checker();
  }
}

// Linux allows a process 65,530 mappings, and each stack with its guard page is two. So a launch has no more stacks
// than 16 workers with a block each, and a worker keeps no more than a block's.
constexpr u32 most_stacks_of_launch = 16 * 1024;
constexpr u32 most_stacks_kept = 1024;

Worker::~Worker() {
  destroy_checker(checker);
  free_stacks();
}

void Worker::free_stacks() {
  if (stacks) {
    munmap(stacks, stack_count * fiber_stack_bytes);
    stacks = nullptr;
    stack_count = 0;
  }
}

void Worker::finish() {
  if (stack_count > most_stacks_kept) {
    free_stacks();
  }
}

void Worker::allocate_stacks(u32 threads) {
  if (stack_count >= threads) {
    return;
  }
  free_stacks();
  void* memory = mmap(nullptr, threads * fiber_stack_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "stacks for the emulated threads");
  }
  stacks = static_cast<char*>(memory);
  stack_count = threads;
  for (u32 i = 0; i < threads; ++i) {
    // A guard page. Where the system allows no more mappings, an overflow goes unnoticed; nothing else changes.
    mprotect(stacks + i * fiber_stack_bytes, page_bytes, PROT_NONE);
  }
}

static u32 blocks_of(Index3 cluster) { return cluster.x * cluster.y * cluster.z; }

void Worker::prepare_block(Block& block, u32 rank) {
  const Request& request = launch->request;
  block.rank = rank;
  block.size = request.block;
  block.grid = request.grid;
  allocate_shared(block, request);
  u32 threads = launch->threads;
  u32 width = request.warp;
  block.fibers.resize(threads);
  block.warps.resize((threads + width - 1) / width);
  for (u32 i = 0; i < block.warps.size(); ++i) {
    u32 first = i * width;
    u32 lanes = threads - first < width ? threads - first : width;
    block.warps[i].block = &block;
    block.warps[i].first_thread = first;
    block.warps[i].members = lanes == 64 ? ~u64{0} : bit(lanes) - 1;
  }
  for (u32 i = 0; i < threads; ++i) {
    Fiber& fiber = block.fibers[i];
    fiber.block = &block;
    fiber.index = {i % block.size.x, i / block.size.x % block.size.y, i / (block.size.x * block.size.y)};
    fiber.linear = i;
    fiber.warp = i / width;
    fiber.lane = i % width;
    fiber.stack_low = stacks + (u64{rank} * threads + i) * fiber_stack_bytes + page_bytes;
    fiber.stack_bytes = fiber_stack_bytes - page_bytes;
  }
}

void Worker::prepare(Launch& with) {
  launch = &with;
  report = Report{};
  patience = 50;
  last_site = nullptr;
  blocks.resize(blocks_of(with.request.cluster));
  allocate_stacks(static_cast<u32>(blocks.size()) * with.threads);
  for (u32 rank = 0; rank < blocks.size(); ++rank) {
    prepare_block(blocks[rank], rank);
  }
  if (checker) {
    checker_begin_launch(*this);
  }
}

// Workers are kept between launches: their stacks are already in memory.
class WorkerPool {
 public:
  std::unique_ptr<Worker> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) {
#ifdef SIMT_CHECK
      return std::make_unique<Worker>(true);
#else
      return std::make_unique<Worker>(false);
#endif
    }
    auto worker = std::move(idle_.back());
    idle_.pop_back();
    return worker;
  }

  void give_back(std::unique_ptr<Worker> worker) {
    worker->finish();
    std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(worker));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Worker>> idle_;
};

static WorkerPool& pool() {
  static WorkerPool* const instance = new WorkerPool;  // never destroyed: threads may outlive static destruction
  return *instance;
}

// --- one launch

// In a function of its own: what the jump comes back to must not hold changed variables in registers.
__attribute__((noinline)) static void run_or_escape(Worker& w) {
  if (sigsetjmp(w.escape, 1) == 0) {
    w.inside = true;
    w.run_blocks();
  }
  w.inside = false;
  w.critical = false;
}

class Rendezvous {
 public:
  explicit Rendezvous(u32 expected) : missing_(expected) {}

  void arrive() {
    std::lock_guard<std::mutex> lock(mutex_);
    --missing_;
    changed_.notify_all();
  }

  bool wait_until(std::chrono::steady_clock::time_point deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_until(lock, deadline, [this] { return missing_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  u32 missing_;
};

static void work(Launch& launch, Worker& w) {
  constexpr u64 signal_stack_bytes = 64 * 1024;
  auto signal_stack_memory = std::make_unique<char[]>(signal_stack_bytes);
  stack_t signal_stack{};
  signal_stack.ss_sp = signal_stack_memory.get();
  signal_stack.ss_size = signal_stack_bytes;
  sigaltstack(&signal_stack, nullptr);

  worker = &w;
  run_or_escape(w);
  worker = nullptr;
  if (w.report.kind != static_cast<u32>(Fault::none)) {
    std::lock_guard<std::mutex> lock(launch.report_mutex);
    if (!launch.stopped.exchange(true)) {
      launch.request.report = w.report;
    }
  }

  stack_t disable{};
  disable.ss_flags = SS_DISABLE;
  sigaltstack(&disable, nullptr);
}

static void launch_workers(Request& request) {
  Launch launch{request,
                image_of(request.kernel),
                request.last_block / blocks_of(request.cluster),
                request.block.x * request.block.y * request.block.z,
                request.first_block / blocks_of(request.cluster),
                {},
                {},
                {}};
  SignalGuard guard;
#ifdef SIMT_CHECK
  u32 count = 1;  // one order of all accesses is what the race rule speaks of
#else
  u32 count = std::min(request.workers, most_stacks_of_launch / (launch.threads * blocks_of(request.cluster)));
#endif
  if (count > launch.clusters - launch.next_cluster) {
    count = static_cast<u32>(launch.clusters - launch.next_cluster);
  }
  auto deadline = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                         std::chrono::duration<double>(request.timeout_s));
  std::vector<std::unique_ptr<Worker>> workers;
  for (u32 i = 0; i < count; ++i) {
    workers.push_back(pool().take());
    workers.back()->prepare(launch);
  }
  Rendezvous finished(count);
  std::vector<std::thread> threads;
  for (auto& each : workers) {
    try {
      threads.emplace_back([&launch, &finished, w = each.get()] {
        work(launch, *w);
        finished.arrive();
      });
    } catch (const std::system_error&) {
      if (threads.empty()) {
        throw;
      }
      finished.arrive();  // fewer threads than asked for: the others take its blocks
    }
  }
  if (!finished.wait_until(deadline)) {
    do {
      for (std::thread& thread : threads) {
        pthread_kill(thread.native_handle(), watchdog_signal());
      }
    } while (!finished.wait_until(std::chrono::steady_clock::now() + std::chrono::milliseconds(1)));
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (auto& each : workers) {
    pool().give_back(std::move(each));
  }
  require_waited(launch);
}

void launch(Request& request) {
  request.report = Report{};
  try {
    launch_workers(request);
  } catch (const std::exception& error) {
    request.report.kind = static_cast<u32>(Fault::resources);
    std::snprintf(request.report.text, sizeof request.report.text, "%s", error.what());
  }
}

}  // namespace simt
