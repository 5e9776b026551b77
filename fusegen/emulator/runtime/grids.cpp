// Dependent launches: a kernel that begins while those before it run, and waits for their end (griddepcontrol.wait).
//
// Here launches come one after another, so nothing would show that one begins too early. What a launch before it reads
// or writes counts as unfinished until a thread has waited. The rule is stricter than PTX's in one thing: a thread has
// to wait itself, though it might meet one that has.
#include <cstdio>

#include "worker.h"
#ifdef SIMT_CHECK
#include "checker.h"
#endif

namespace simt {

void wait_for_grids() {
  current_fiber()->waited = true;
  worker->launch->waited.store(true, std::memory_order_relaxed);
}

// The end of a launch is that of all before it only if it has waited for them; the next launch takes it for that.
void require_waited(Launch& launch) {
  Report& report = launch.request.report;
  if (!launch.request.dependent || launch.waited || report.kind != static_cast<u32>(Fault::none)) {
    return;
  }
  report.kind = static_cast<u32>(Fault::race);
  std::snprintf(report.text, sizeof report.text,
                "a dependent launch ends, and no thread of it has waited for the launches before it "
                "(griddepcontrol.wait): those behind it take it that they have ended");
}

#ifdef SIMT_CHECK

void require_finished(const char* place, u64 bytes, Access access, const void* site) {
  const Request& request = worker->launch->request;
  for (u64 i = 0; i < request.unfinished_count; ++i) {
    const BufferRange& other = request.unfinished[i];
    if (place + bytes <= other.start || place >= other.start + other.bytes || (access == Access::read && !other.writable)) {
      continue;
    }
    fail_at(Fault::race, site, 0,
            "%s of byte %lld of %s, which a launch before this one may still be %s: this thread has not waited for its "
            "end (griddepcontrol.wait)",
            verb(access), static_cast<long long>(place - other.start), other.name, other.writable ? "writing" : "reading");
  }
}

#endif

}  // namespace simt
