// What a kernel's library exports, appended behind its source by kernel.py as
// SIMT_EXPORT(name, (launch bounds), (blocks of a cluster)).
#pragma once

namespace simt {

static u32 static_shared_end;

template <u32... Places>
struct Sequence {};

template <u32 Count, u32... Places>
struct CountTo : CountTo<Count - 1, Count - 1, Places...> {};

template <u32... Places>
struct CountTo<0, Places...> {
  using type = Sequence<Places...>;
};

template <class Function>
struct Launcher;

template <class... Parameters>
struct Launcher<void (*)(Parameters...)> {
  static constexpr u32 count = sizeof...(Parameters);

  template <u32... Places>
  __attribute__((no_sanitize("thread"))) static void call_with(void* kernel, void** arguments, Sequence<Places...>) {
    (void)arguments;
    reinterpret_cast<void (*)(Parameters...)>(kernel)(*static_cast<Parameters*>(arguments[Places])...);
  }

  __attribute__((no_sanitize("thread"))) static void call(void* kernel, void** arguments) {
    call_with(kernel, arguments, typename CountTo<count>::type());
  }

  static void write_sizes(u32* sizes) {
    const u32 all[] = {sizeof(Parameters)..., 0};
    for (u32 i = 0; i < count; ++i) {
      sizes[i] = all[i];
    }
  }
};

// Of a thread when the kernel starts: as many as its launch bounds allow, where setmaxnreg is to move them. 0 without.
constexpr u32 registers_of(const unsigned (&bounds)[3]) {
  constexpr u32 of_multiprocessor = 64 * 1024, most = 256;
  const u32 threads = (bounds[0] + 31) / 32 * 32 * (bounds[1] ? bounds[1] : 1);
  const u32 each = threads ? of_multiprocessor / threads / 8 * 8 : 0;
  return each < most ? each : most;
}

}  // namespace simt

#define SIMT_LIST(...) \
  { __VA_ARGS__ }
#define SIMT_EXPORT(entry, bounds, cluster)                                                         \
  extern "C" __attribute__((visibility("default"))) void fusegen_launch(simt::Request* request) {   \
    request->trampoline = simt::Launcher<decltype(&entry)>::call;                                   \
    request->kernel = reinterpret_cast<void*>(&entry);                                              \
    request->static_shared_end = &simt::static_shared_end;                                          \
    constexpr unsigned launch_bounds[3] = SIMT_LIST bounds;                                         \
    request->registers = simt::registers_of(launch_bounds);                                         \
    simt::launch(*request);                                                                         \
  }                                                                                                 \
  extern "C" __attribute__((visibility("default"))) unsigned fusegen_parameter_count() {            \
    return simt::Launcher<decltype(&entry)>::count;                                                 \
  }                                                                                                 \
  extern "C" __attribute__((visibility("default"))) void fusegen_parameter_sizes(unsigned* sizes) { \
    simt::Launcher<decltype(&entry)>::write_sizes(sizes);                                           \
  }                                                                                                 \
  extern "C" __attribute__((visibility("default"))) void fusegen_cluster_size(unsigned* size) {     \
    const unsigned all[3] = SIMT_LIST cluster;                                                      \
    for (int i = 0; i < 3; ++i) {                                                                   \
      size[i] = all[i] ? all[i] : 1;                                                                \
    }                                                                                               \
  }
