// Order between threads that need not meet: by mbarriers, by the cluster barrier, by bulk copies.
//
// In a launch with any of these each thread has a clock: for every author of accesses (the threads of the cluster, and
// for each mbarrier the copies that it counts) the phase below which it knows all of that author's accesses. To arrive
// is to give away what one knows, to see a phase complete is to take over what its arrivals gave; barriers and
// __syncwarp are both at once. An access is ordered behind another if its thread knows that one.
//
// Other launches do without: the comparisons of checker_rules.cpp are all they need, at a fraction of the cost.
#ifdef SIMT_CHECK

#include <algorithm>

#include "checker.h"

namespace simt {

static Clocks& clocks() { return *worker->checker->clocks; }

static u32 author_of(const Fiber& fiber) { return block_of(fiber).rank * worker->launch->threads + fiber.linear; }

static void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) {
    into.resize(other.size());
  }
  u32* __restrict to = into.data();
  const u32* __restrict from = other.data();
  for (u64 i = 0, count = other.size(); i < count; ++i) {
    to[i] = to[i] > from[i] ? to[i] : from[i];
  }
}

// Clocks are shared between threads that know the same, and the latest joins are often asked for again: by all threads of
// a warpgroup, while others wait for something else.
static Known joined(const Known& left, const Known& right) {
  if (!left || !right || left == right) {
    return left ? left : right;
  }
  Clocks& all = clocks();
  for (const Join& made : all.joins) {
    if (made.left == left && made.right == right) {
      return made.both;
    }
  }
  Clock both = *left;
  join(both, *right);
  Join& made = all.joins[all.next_join++ % joins_kept];
  made = {left, right, std::make_shared<const Clock>(std::move(both))};
  return made.both;
}

static u32 known_of(const Known& known, u32 author) { return known && author < known->size() ? (*known)[author] : 0; }

// --- what orders

// All of these fibers learn what any of them knows, and begin a phase.
template <class Fibers>
static void meet(const Fibers& fibers) {
  Clocks& all = clocks();
  u32 fresh = ++worker->checker->phase;
  Clock together;
  const Clock* latest = nullptr;
  for (const Fiber* fiber : fibers) {
    const Known& known = all.threads[author_of(*fiber)].known;
    if (known && known.get() != latest) {
      latest = known.get();
      join(together, *known);
    }
  }
  together.resize(std::max<u64>(together.size(), all.threads.size()));
  for (const Fiber* fiber : fibers) {
    together[author_of(*fiber)] = fresh;
  }
  Known shared = std::make_shared<const Clock>(std::move(together));
  for (const Fiber* fiber : fibers) {
    all.threads[author_of(*fiber)] = {fresh, shared};
  }
}

void checker_meet_block(Block& block) {
  if (!worker->checker->clocks) {
    return;
  }
  Critical critical;
  std::vector<const Fiber*> fibers;
  for (const Fiber& fiber : block.fibers) {
    fibers.push_back(&fiber);
  }
  meet(fibers);
}

void checker_meet_lanes(Warp& warp, u64 lanes) {
  if (!worker->checker->clocks) {
    return;
  }
  Critical critical;
  std::vector<const Fiber*> fibers;
  FOR_EACH_LANE(lane, lanes) { fibers.push_back(&warp.block->fibers[warp.first_thread + lane]); }
  meet(fibers);
}

static Meeting& meeting_at(const void* object) {
  Clocks& all = clocks();
  Meeting& meeting = all.meetings[object];
  if (meeting.author == 0) {
    meeting.author = static_cast<u32>(all.threads.size() + all.meetings.size());
  }
  return meeting;
}

static void learn(Clock& clock, u32 author, u32 phase) {
  if (clock.size() <= author) {
    clock.resize(author + 1);
  }
  clock[author] = std::max(clock[author], phase);
}

void checker_release(const Fiber& fiber, const void* object) {
  if (!worker->checker->clocks) {
    return;
  }
  Critical critical;
  Meeting& meeting = meeting_at(object);
  ThreadOrder& thread = clocks().threads[author_of(fiber)];
  if (thread.known && thread.known != meeting.latest) {
    join(meeting.given, *thread.known);
    meeting.latest = thread.known;
  }
  learn(meeting.given, author_of(fiber), thread.phase + 1);
  thread.phase = ++worker->checker->phase;
}

void checker_complete(const void* object) {
  if (!worker->checker->clocks) {
    return;
  }
  Critical critical;
  Meeting& meeting = meeting_at(object);
  meeting.taken = std::make_shared<const Clock>(meeting.given);
}

void checker_acquire(const Fiber& fiber, const void* object) {
  if (!worker->checker->clocks) {
    return;
  }
  Critical critical;
  Known& known = clocks().threads[author_of(fiber)].known;
  known = joined(known, meeting_at(object).taken);
}

void clocks_begin_cluster(Checker& checker, u32 threads) {
  Clocks& all = *checker.clocks;
  all.threads.assign(threads, ThreadOrder{checker.phase, nullptr});
  all.meetings.clear();
  all.commits.clear();
  all.arrivals.clear();
  all.fenced.clear();
  all.fenced_mbarriers.clear();
  all.plain_copiers.clear();
  all.latest_fenced = nullptr;
  checker.tensor.clear();
  for (Join& made : all.joins) {
    made = {};
  }
}

// --- fences and atomic updates: to publish is to give away what one knows, too

Known clocks_published(const Fiber& fiber) {
  ThreadOrder& thread = clocks().threads[author_of(fiber)];
  Clock clock = thread.known ? *thread.known : Clock{};
  learn(clock, author_of(fiber), thread.phase + 1);
  thread.phase = ++worker->checker->phase;
  return std::make_shared<const Clock>(std::move(clock));
}

void clocks_take_over(const Fiber& fiber, const Known& published) {
  Known& known = clocks().threads[author_of(fiber)].known;
  known = joined(known, published);
}

bool clocks_visible(const Takeover& takeover, const Fiber& fiber) {
  u32 author = author_of(fiber);
  return takeover.by_thread == author ||
         takeover.in_phase < known_of(clocks().threads[author].known, takeover.by_thread);
}

// --- proxies. Which fence lies on the way from a write to an asynchronous read is not asked: any fence by a thread that
// knew of the write will do.

void checker_fence_proxy(const Fiber& fiber) {
  if (!worker->checker->clocks) {
    return;
  }
  Critical critical;
  Clocks& all = clocks();
  ThreadOrder& thread = all.threads[author_of(fiber)];
  if (thread.known && thread.known != all.latest_fenced) {  // threads that have met know the same
    join(all.fenced, *thread.known);
    join(all.fenced_mbarriers, *thread.known);
    all.latest_fenced = thread.known;
  }
  learn(all.fenced, author_of(fiber), thread.phase + 1);
  learn(all.fenced_mbarriers, author_of(fiber), thread.phase + 1);
  thread.phase = ++worker->checker->phase;
}

// --- mbarriers that count copies

void checker_made_mbarrier(const Fiber& fiber, const void* mbarrier, const void* site) {
  if (!worker->checker->clocks) {
    return;
  }
  Critical critical;
  meeting_at(mbarrier).made = clocks_stamp(fiber, offset_of_site(site));
}

void checker_fence_mbarriers(const Fiber& fiber) {
  if (!worker->checker->clocks) {
    return;
  }
  Critical critical;
  ThreadOrder& thread = clocks().threads[author_of(fiber)];
  learn(clocks().fenced_mbarriers, author_of(fiber), thread.phase + 1);
  thread.phase = ++worker->checker->phase;
}

void checker_use_mbarrier(const void* mbarrier, const void* site) {
  if (!worker->checker->clocks) {
    return;
  }
  Critical critical;
  const Stamp made = meeting_at(mbarrier).made;
  const Clock& fenced = clocks().fenced_mbarriers;
  if (made.phase && (made.who >= fenced.size() || made.phase >= fenced[made.who])) {
    fail_at(Fault::mbarrier, site, made.site,
            "this copy is counted by an mbarrier that no fence has published: fence.mbarrier_init.release.cluster must "
            "come behind mbarrier.init, or fence.proxy.async");
  }
}

void clocks_require_fenced(const Region& region, const Cell& cell, const char* place, const void* site) {
  const Clocks& all = clocks();
  const u32 author = cell.write.who;
  const bool asynchronous = author >= all.threads.size() && !all.plain_copiers.count(author);
  if (cell.write.phase < worker->checker->first_phase || asynchronous ||
      (author < all.fenced.size() && cell.write.phase < all.fenced[author])) {
    return;
  }
  const Member& member = member_at(region, place);
  fail_at(Fault::race, site, cell.write.site & site_mask,
          "an asynchronous instruction reads byte %lld of %s, which %s: "
          "fence.proxy.async must come between",
          static_cast<long long>(place - member.low), member.name,
          author < all.threads.size() ? "a thread has written by a plain store" : "cp.async has written");
}

// --- the rule

Stamp clocks_stamp(const Fiber& fiber, u32 site) {
  return {clocks().threads[author_of(fiber)].phase, author_of(fiber), site};
}

static bool ordered(const Stamp& earlier, const Fiber& fiber) {
  const Checker& checker = *worker->checker;
  if (earlier.has(flag_copying)) {
    return false;
  }
  if (earlier.phase < checker.first_phase) {
    return published_to(checker, earlier, fiber);
  }
  u32 author = author_of(fiber);
  return earlier.who == author || earlier.phase < known_of(clocks().threads[author].known, earlier.who);
}

bool clocks_ordered(const Stamp& earlier, const Fiber& fiber) { return ordered(earlier, fiber); }

// A cell remembers one reader in place; more of them, not ordered with each other, in a set that `foreign_read` names.
// Atomic updates that the latest one is not ordered with are in that set as well, and the plain write before them all.
constexpr u32 flag_plain_write = flag_warps;

static std::vector<Stamp>* readers_of(const Cell& cell) {
  return cell.foreign_read.phase ? &clocks().readers[cell.foreign_read.phase] : nullptr;
}

static void forget_readers(Cell& cell) {
  if (std::vector<Stamp>* readers = readers_of(cell)) {
    Critical critical;
    readers->clear();
    clocks().free_readers.push_back(cell.foreign_read.phase);
    cell.foreign_read.phase = 0;
  }
}

static void remember(Cell& cell, const Stamp& stamp) {
  Critical critical;
  Clocks& all = clocks();
  if (!cell.foreign_read.phase) {
    if (all.free_readers.empty()) {
      all.free_readers.push_back(static_cast<u32>(std::max<u64>(1, all.readers.size())));
      all.readers.resize(all.free_readers.back() + 1);
    }
    cell.foreign_read.phase = all.free_readers.back();
    all.free_readers.pop_back();
  }
  readers_of(cell)->push_back(stamp);
}

void clocks_split(Cell& copy) {
  if (const std::vector<Stamp>* readers = readers_of(copy)) {
    std::vector<Stamp> stamps = *readers;
    copy.foreign_read.phase = 0;
    for (const Stamp& stamp : stamps) {
      remember(copy, stamp);
    }
  }
}

static void remember_read(Cell& cell, const Stamp& now, const Fiber& fiber) {
  auto is_past = [&](const Stamp& earlier) {
    return !earlier.has(flag_atomic | flag_plain_write) && (earlier.who == now.who || ordered(earlier, fiber));
  };
  if (std::vector<Stamp>* readers = readers_of(cell)) {
    Critical critical;
    readers->erase(std::remove_if(readers->begin(), readers->end(), is_past), readers->end());
    readers->push_back(now);
  } else if (!cell.read.phase || is_past(cell.read)) {
    cell.read = now;
  } else {
    remember(cell, now);
  }
}

static void forget_earlier_clusters(const Region& region, Cell& cell) {
  if (region.memory == Memory::shared && std::max(cell.write.phase, cell.read.phase) < worker->checker->first_phase) {
    forget_readers(cell);  // shared memory starts anew with each cluster
    cell = Cell{};
  }
}

void clocks_require_written(Region& region, Cell& cell, const char* place, const Fiber& fiber, const void* site) {
  forget_earlier_clusters(region, cell);
  if (!cell.write.phase) {
    suspect(region, place, Access::read, site);
  } else if (!ordered(cell.write, fiber)) {
    fail_race(region, place, cell.write, cell.write.has(flag_atomic) ? Access::atomic : Access::write, Access::read,
              site);
  }
}

void check_cell_by_clock(Region& region, Cell& cell, const char* place, Access access, bool needs_value,
                         const Fiber& fiber, const void* site, u32 site_offset) {
  forget_earlier_clusters(region, cell);
  auto require_order = [&](const Stamp& earlier, Access kind) {
    bool atomics = access == Access::atomic && kind == Access::atomic;
    if (!atomics && !ordered(earlier, fiber)) {
      fail_race(region, place, earlier, kind, access, site);
    }
  };
  if (cell.write.phase) {
    require_order(cell.write, cell.write.has(flag_atomic) ? Access::atomic : Access::write);
  } else if (needs_value && !member_at(region, place).initialised) {
    suspect(region, place, access, site);
  }
  if (std::vector<Stamp>* others = readers_of(cell)) {
    for (const Stamp& other : *others) {
      if (other.has(flag_atomic)) {
        require_order(other, Access::atomic);
      } else if (other.has(flag_plain_write)) {
        require_order(other, Access::write);
      } else if (access != Access::read) {
        require_order(other, Access::read);
      }
    }
  }
  const Stamp now = clocks_stamp(fiber, site_offset);
  if (access == Access::read) {
    remember_read(cell, now, fiber);
    return;
  }
  if (cell.read.phase) {
    require_order(cell.read, Access::read);
    cell.read.phase = 0;
  }
  const Stamp before = cell.write;
  cell.write = now;
  if (access != Access::atomic) {
    forget_readers(cell);
    return;
  }
  cell.write.site |= flag_atomic;
  if (!before.phase) {
    return;
  }
  if (!before.has(flag_atomic)) {
    remember(cell, before);
    readers_of(cell)->back().site |= flag_plain_write;
  } else if (before.who != now.who && !ordered(before, fiber)) {
    if (std::vector<Stamp>* others = readers_of(cell)) {
      auto is_past = [&](const Stamp& earlier) {
        return !earlier.has(flag_plain_write) && (earlier.who == before.who || ordered(earlier, fiber));
      };
      others->erase(std::remove_if(others->begin(), others->end(), is_past), others->end());
    }
    remember(cell, before);
  }
}

// --- copies that an mbarrier counts: an author of their own, known to who sees the phase complete

// Those of the generic proxy have one to themselves, kept with the place behind the mbarrier's: that of no other one.
static u32 copier_of(const void* object, bool plain) {
  if (!plain) {
    return meeting_at(object).author;
  }
  u32 author = meeting_at(static_cast<const char*>(object) + 1).author;
  clocks().plain_copiers.insert(author);
  return author;
}

u32 clocks_land(const void* object, bool plain) {
  Critical critical;
  u32 author = copier_of(object, plain);
  u32 phase = ++worker->checker->phase;
  learn(meeting_at(object).given, author, phase + 1);
  return phase;
}

// --- reads that go on until they are waited for: likewise, known to who has

u32 clocks_next_phase(const void* reader) {
  Critical critical;
  meeting_at(reader);
  return ++worker->checker->phase;
}

void clocks_acquire_reads(const Fiber& fiber, const void* reader, u32 phase) {
  Critical critical;
  Meeting& meeting = meeting_at(reader);
  if (meeting.phase != phase) {
    Clock clock;
    learn(clock, meeting.author, phase + 1);
    meeting.taken = std::make_shared<const Clock>(std::move(clock));
    meeting.phase = phase;
  }
  Known& known = clocks().threads[author_of(fiber)].known;
  known = joined(known, meeting.taken);
}

// A commit gives what its thread knew when it was issued, and the work that it waits for; not the thread's own writes.
void checker_commit(const Fiber& fiber, const void* reader) {
  if (!worker->checker->clocks) {
    return;
  }
  Critical critical;
  clocks().commits[reader].push_back(clocks().threads[author_of(fiber)].known);
}

void checker_tell(const void* mbarrier, const void* reader, u32 phase, bool last) {
  if (!worker->checker->clocks) {
    return;
  }
  Critical critical;
  std::deque<Known>& commits = clocks().commits[reader];
  clocks().arrivals[mbarrier].push_back({commits.front(), meeting_at(reader).author, phase});
  if (last) {
    commits.pop_front();
  }
}

void checker_told(const void* mbarrier) {
  if (!worker->checker->clocks) {
    return;
  }
  Critical critical;
  std::deque<Arrival>& arrivals = clocks().arrivals[mbarrier];
  Meeting& meeting = meeting_at(mbarrier);
  if (arrivals.front().known) {
    join(meeting.given, *arrivals.front().known);
  }
  learn(meeting.given, arrivals.front().reader, arrivals.front().phase + 1);
  arrivals.pop_front();
}

void clocks_remember_copied(Cell& cell, const Stamp& read) {
  if (std::vector<Stamp>* readers = readers_of(cell)) {
    Critical critical;
    auto is_past = [&](const Stamp& earlier) {
      return !earlier.has(flag_atomic | flag_plain_write) && earlier.who == read.who;
    };
    readers->erase(std::remove_if(readers->begin(), readers->end(), is_past), readers->end());
    readers->push_back(read);
  } else if (!cell.read.phase || cell.read.who == read.who) {
    cell.read = read;
  } else {
    remember(cell, read);
  }
}

u32 clocks_copier(const void* object, bool plain) { return copier_of(object, plain); }

// --- the shared memory of another block

static bool has_heard_from(const Fiber& fiber, const Block& block) {
  if (fiber.cluster_waits > 0) {
    return true;
  }
  const Known& known = clocks().threads[author_of(fiber)].known;
  u32 first = block.rank * worker->launch->threads;
  for (u32 i = 0; i < worker->launch->threads; ++i) {
    if (known_of(known, first + i)) {
      return true;
    }
  }
  return false;
}

void require_reachable(const Region& region, const char* place, Access access, const Fiber& fiber, const void* site) {
  const Block& owner = *region.owner;
  const Member& member = member_at(region, place);
  const char* what = owner.live == 0                ? "which has ended: a cluster barrier must come before the end"
                     : has_heard_from(fiber, owner) ? nullptr
                                                    : "which may not have started: a cluster barrier must come first";
  if (what) {
    fail_at(Fault::race, site, 0, "%s of byte %lld of %s in the shared memory of block (%u, %u, %u), %s", verb(access),
            static_cast<long long>(place - member.low), member.name, owner.index.x, owner.index.y, owner.index.z, what);
  }
}

// A block's shared memory goes with its last thread: whatever others do there must be known to one of its threads.
void checker_end_block(Block& block) {
  Checker& checker = *worker->checker;
  if (!checker.clocks) {
    return;
  }
  checker_meet_block(block);
  const Fiber& last = *current_fiber();
  u32 first = block.rank * worker->launch->threads;
  auto require_past = [&](const Region& region, u64 index, const Stamp& stamp, const char* what) {
    bool own = stamp.who - first < worker->launch->threads && !stamp.has(flag_copying);
    if (own || stamp.phase < checker.first_phase || ordered(stamp, last)) {
      return;
    }
    const char* place = region.origin + (index << region.grain_shift);
    const Member& member = member_at(region, place);
    const void* site = worker->launch->image.base + (stamp.site & site_mask);
    fail_at(Fault::race, site, 0,
            "block (%u, %u, %u) may end before this %s byte %lld of %s in its shared memory: nothing that it waits for "
            "comes after",
            block.index.x, block.index.y, block.index.z, what, static_cast<long long>(place - member.low), member.name);
  };
  for (const Region& region : checker.regions) {
    for (u64 i = 0; region.owner == &block && i < region.cell_count; ++i) {
      const Cell& cell = region.cells[i];
      if (cell.write.phase) {
        require_past(region, i, cell.write, stamp_is_copy(cell.write) ? "copy has filled" : "write of");
      }
      if (cell.read.phase) {
        require_past(region, i, cell.read, "read of");
      }
      if (const std::vector<Stamp>* readers = readers_of(cell)) {
        for (const Stamp& stamp : *readers) {
          require_past(region, i, stamp, "access to");
        }
      }
    }
  }
}

bool stamp_is_copy(const Stamp& stamp) {
  const Checker& checker = *worker->checker;
  return stamp.has(flag_copying) || (checker.clocks && stamp.who >= checker.clocks->threads.size());
}

}  // namespace simt

#endif
