// What interrupts a kernel from outside: the watchdog, and crashes.
//
// Watchdog. A thread that spins never enters the scheduler, so nothing the scheduler counts can stop it, and counting
// in the kernel's own code would cost every loop its speed. Instead the launching thread waits with a deadline and
// then sends the workers a real-time signal; the handler leaves the fiber for good by siglongjmp to the worker's own
// stack. That is safe because a kernel owns nothing: it takes no lock and allocates nothing, and the few places of
// the runtime that do are marked `critical` and are asked again a millisecond later. A process to kill would be as
// sure, but it would need every buffer in shared memory and tens of milliseconds a launch. The same way out serves
// SIGSEGV, SIGBUS, SIGFPE and SIGILL.
#include <signal.h>
#include <ucontext.h>

#include <cstdio>
#include <mutex>

#include "worker.h"

namespace simt {

int watchdog_signal() { return SIGRTMIN + 7; }

static const void* program_counter(const void* context) {
  const auto& registers = static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  return reinterpret_cast<const void*>(registers.gregs[REG_RIP]);
#elif defined(__aarch64__)
  return reinterpret_cast<const void*>(registers.pc);
#else
  (void)registers;
  return nullptr;
#endif
}

// Where the kernel is, in the form of a return address: one past the instruction. The instruction may lie in the
// runtime, the math library or a stub of the linker; then the latest memory access has to do, if the checking build
// knows one.
static void note_interrupted_site(const Worker& w, const void* place, Report& report) {
  u64 site = w.launch->image.site(place);
  report.site = site ? site + 1 : 0;
  report.fallback_site = w.launch->image.site(w.last_site);
}

// The signals of a process are one, but this library may be in it more than once: the fast and the checking runtime,
// and their other versions. So a handler that is asked about a thread it does not know asks the one before it, and
// leaves its place in that chain only while it is the last.
struct Handler {
  int signal;
  struct sigaction before;
  bool in_chain;
};

struct SignalHandlers {
  std::mutex mutex;
  int users = 0;
  Handler watchdog = {watchdog_signal(), {}, false};
  Handler crashes[4] = {{SIGSEGV, {}, false}, {SIGBUS, {}, false}, {SIGFPE, {}, false}, {SIGILL, {}, false}};
};

static SignalHandlers& handlers() {
  static SignalHandlers* const instance = new SignalHandlers;
  return *instance;
}

static void ask_the_one_before(const Handler& handler, siginfo_t* info, void* context) {
  const struct sigaction& before = handler.before;
  if (before.sa_flags & SA_SIGINFO) {
    before.sa_sigaction(handler.signal, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(handler.signal);
  } else if (handler.signal != handlers().watchdog.signal) {
    sigaction(handler.signal, &before, nullptr);  // returning repeats the instruction, and the process ends as it would
  }
}

static const Handler& handler_of(int signal) {
  for (const Handler& handler : handlers().crashes) {
    if (handler.signal == signal) {
      return handler;
    }
  }
  return handlers().watchdog;
}

static void on_timeout(int, siginfo_t* info, void* context) {
  Worker* w = worker;
  if (!w) {
    ask_the_one_before(handlers().watchdog, info, context);
    return;
  }
  if (!w->inside || w->critical) {
    return;
  }
  const void* place = program_counter(context);
  if (!w->launch->image.contains(place) && w->patience-- > 0) {
    return;  // in the runtime or the math library: the next signal may find the kernel's own line
  }
  Report& report = w->report;
  report.kind = static_cast<u32>(Fault::timeout);
  note_interrupted_site(*w, place, report);
  Fiber* fiber = current_fiber();
  report.line = report.site || !fiber ? 0 : static_cast<u32>(fiber->line);
  describe_place(report);
  std::snprintf(report.text, sizeof report.text, "the launch did not end within %g s; this thread was running",
                w->launch->request.timeout_s);
  escape_from_fiber();
}

static void on_crash(int signal, siginfo_t* info, void* context) {
  Worker* w = worker;
  Fiber* fiber = w ? current_fiber() : nullptr;
  if (!w || !w->inside || !fiber || fiber == &w->scheduler) {
    ask_the_one_before(handler_of(signal), info, context);
    return;
  }
  Report& report = w->report;
  note_interrupted_site(*w, program_counter(context), report);
  report.line = report.site ? 0 : static_cast<u32>(fiber->line);
  describe_place(report);
  const char* address = static_cast<const char*>(info->si_addr);
  bool in_guard = address < fiber->stack_low && address >= fiber->stack_low - page_bytes;
  const char* text = nullptr;
  Fault kind = Fault::segfault;
  if (signal == SIGFPE) {
    kind = Fault::divide_by_zero;
    text = "an integer is divided by zero";
  } else if (signal == SIGILL) {
    kind = Fault::trap;
    text = "the kernel trapped";
  } else if (in_guard) {
    kind = Fault::stack_overflow;
    text = "the local variables of this thread need more than 252 KiB";
  }
  report.kind = static_cast<u32>(kind);
  if (text) {
    std::snprintf(report.text, sizeof report.text, "%s", text);
  } else {
    std::snprintf(report.text, sizeof report.text,
                  "an access to address %p, which belongs to no memory of this process; the checking build tells more",
                  static_cast<const void*>(address));
  }
  escape_from_fiber();
}

static void put_in(Handler& handler, void (*action)(int, siginfo_t*, void*)) {
  if (handler.in_chain) {
    return;
  }
  struct sigaction ours{};
  sigemptyset(&ours.sa_mask);
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  ours.sa_sigaction = action;
  sigaction(handler.signal, &ours, &handler.before);
  handler.in_chain = true;
}

static void take_out(Handler& handler, void (*action)(int, siginfo_t*, void*)) {
  struct sigaction current{};
  sigaction(handler.signal, nullptr, &current);
  if ((current.sa_flags & SA_SIGINFO) && current.sa_sigaction == action) {
    sigaction(handler.signal, &handler.before, nullptr);
    handler.in_chain = false;
  }
}

// Holds the handlers of crashes for as long as any launch runs, and then puts back what was there (pytest's
// faulthandler, say). The watchdog's stays: nobody else uses its signal, and a late one would otherwise end the
// process.
SignalGuard::SignalGuard() {
  std::lock_guard<std::mutex> lock(handlers().mutex);
  if (handlers().users++) {
    return;
  }
  put_in(handlers().watchdog, on_timeout);
  for (Handler& handler : handlers().crashes) {
    put_in(handler, on_crash);
  }
}

SignalGuard::~SignalGuard() {
  std::lock_guard<std::mutex> lock(handlers().mutex);
  if (--handlers().users) {
    return;
  }
  for (Handler& handler : handlers().crashes) {
    take_out(handler, on_crash);
  }
}

}  // namespace simt
