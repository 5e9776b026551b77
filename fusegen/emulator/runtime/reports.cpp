// How a fault leaves the fiber that found it: a filled-in Report, and a jump to the worker's own stack.
#include <cstdarg>
#include <cstdio>

#include "worker.h"

namespace simt {

void describe_place(Report& report) {
  Fiber* fiber = current_fiber();
  if (!fiber || fiber == &worker->scheduler) {
    return;
  }
  report.has_place = 1;
  report.block = fiber->block->index;
  report.thread = fiber->index;
}

void escape_from_fiber() {
  const Report* suspicion = checker_suspicion(*worker);
  if (suspicion && worker->report.kind != static_cast<u32>(Fault::race)) {
    worker->report = *suspicion;  // whatever went wrong, it went wrong after that
  }
  // From here on the watchdog's handler does nothing. Its signals queue up, and siglongjmp unblocks them while it still
  // stands on the small signal stack: handlers that jump again from there would nest until that stack is full.
  worker->inside = false;
  siglongjmp(worker->escape, 1);
}

void fail(Fault kind, int line, const char* format, ...) {
  Report& report = worker->report;
  report.kind = static_cast<u32>(kind);
  report.line = static_cast<u32>(line);
  if (line == 0) {
    report.site = worker->launch->image.site(__builtin_return_address(0));
  }
  describe_place(report);
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(report.text, sizeof report.text, format, arguments);
  va_end(arguments);
  escape_from_fiber();
}

void fail_at(Fault kind, const void* site, u64 other_site, const char* format, ...) {
  Report& report = worker->report;
  report.kind = static_cast<u32>(kind);
  report.line = 0;
  report.site = worker->launch->image.site(site);
  report.other_site = other_site;
  describe_place(report);
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(report.text, sizeof report.text, format, arguments);
  va_end(arguments);
  escape_from_fiber();
}

// A fault about a thread that waits, told by another one. `other_line` is where the thread is that it disagrees with,
// or 0.
void fail_for(const Fiber& fiber, int other_line, Fault kind, const char* format, ...) {
  Report& report = worker->report;
  report.kind = static_cast<u32>(kind);
  report.line = static_cast<u32>(fiber.line);
  report.other_line = static_cast<u32>(other_line);
  report.has_place = 1;
  report.block = fiber.block->index;
  report.thread = fiber.index;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(report.text, sizeof report.text, format, arguments);
  va_end(arguments);
  escape_from_fiber();
}

}  // namespace simt
