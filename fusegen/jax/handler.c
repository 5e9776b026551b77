// XLA's foreign calls, on NVIDIA GPUs and on the CPU: fusegen/jax/native.py compiles this against jaxlib's header.
//
// On GPUs, fusegen_call finds the call by its key and the stream's context, puts XLA's addresses among the arguments, encodes the
// tensor maps, and launches on XLA's stream. It allocates nothing, waits for nothing and reads no array: the launches
// depend on nothing but the call's shapes and addresses, so that XLA may record them in a graph of CUDA's
// (COMMAND_BUFFER_COMPATIBLE). The driver's functions come from outside, so that no header of CUDA's is needed.
//
// On the CPU, fusegen_emulate hands the call to Python, where the emulator is. XLA's threads may come when Python is
// ending, and would never come back from it: from fusegen_close on they are turned away here.

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

#if XLA_FFI_API_MAJOR != 0
#error "fusegen.jax knows version 0 of XLA's interface; install an earlier jax, or a later fusegen"
#endif

enum {
    KEY = 32,             // digits
    MOST_ARGUMENTS = 512, // of a kernel: 4 KiB of parameters, as CUDA's kernels had before 12.1
    MOST_MAPS = 32,       // as many fill that
    MOST_ARRAYS = 256,    // of a call
    MAP_WORDS = 16,       // of a CUtensorMap
    WIDEST = 16,          // bytes of the widest vector that a kernel loads
    BUCKETS = 256,
};
enum { ADDRESS, NUMBER, MAP }; // kinds of arguments

typedef struct {
    int32_t kind;
    int32_t base;   // ADDRESS: of which array; MAP: which map
    int64_t number; // ADDRESS: so many bytes behind its beginning; NUMBER: the argument's 8 bytes
} Argument;

typedef struct {
    int32_t base;
    int32_t type, promotion, swizzle; // as cuda.h has them
    int64_t offset;
    uint32_t rank, box[5], steps[5];
    uint64_t shape[5], strides[4];
} Map;

typedef struct {
    void *function;
    uint32_t grid[2], threads, shared_bytes;
    int32_t arguments, maps;
    const Argument *argument;
    const Map *map;
} Launch;

typedef struct Call {
    char key[KEY];
    const char *name;
    void *context;
    int32_t operands, arrays, launches;
    const Launch *launch;
    struct Call *next;
} Call;

// Functions of the driver, which return 0 for success.
typedef struct {
    int (*launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                  unsigned block_z, unsigned shared_bytes, void *stream, void **arguments, void **extra);
    int (*encode)(void *map, int type, uint32_t rank, void *address, const uint64_t *shape, const uint64_t *strides,
                  const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill);
    int (*context_of)(void *stream, void **context);
    int (*current)(void **context);
    int (*push)(void *context);
    int (*pop)(void **context);
    int (*error_name)(int status, const char **name);
} Driver;

static Driver driver;
static _Atomic(Call *) buckets[BUCKETS];

#define SHARED __attribute__((visibility("default")))

SHARED void fusegen_driver(const Driver *functions) { driver = *functions; }

static unsigned bucket(const char *key) {
    unsigned found = 0;
    for (int digit = 0; digit < 2; digit++)
        found = found * 16 + (unsigned)(key[digit] <= '9' ? key[digit] - '0' : key[digit] - 'a' + 10);
    return found % BUCKETS;
}

// What is added stays, where it is; one thread adds at a time, while others read.
SHARED void fusegen_add(Call *call) {
    _Atomic(Call *) *first = &buckets[bucket(call->key)];
    call->next = atomic_load_explicit(first, memory_order_relaxed);
    atomic_store_explicit(first, call, memory_order_release);
}

static const Call *found(const char *key, const void *context) {
    Call *call = atomic_load_explicit(&buckets[bucket(key)], memory_order_acquire);
    while (call && (memcmp(call->key, key, KEY) || call->context != context))
        call = call->next;
    return call;
}

static XLA_FFI_Error *failure(const XLA_FFI_CallFrame *frame, const char *text) {
    XLA_FFI_Error_Create_Args asked = {.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE,
                                       .message = text,
                                       .errc = XLA_FFI_Error_Code_INTERNAL};
    return frame->api->XLA_FFI_Error_Create(&asked);
}

static XLA_FFI_Error *refused(const XLA_FFI_CallFrame *frame, const char *name, const char *doing, int status) {
    char text[512];
    const char *said = NULL;
    if (driver.error_name(status, &said) || !said)
        said = "an error that it has no name for";
    snprintf(text, sizeof text, "%s: %s failed: CUDA says %s (%d)", name, doing, said, status);
    return failure(frame, text);
}

static const char *key_in(const XLA_FFI_Attrs *attributes) {
    for (int64_t place = 0; place < attributes->size; place++) {
        const XLA_FFI_ByteSpan *name = attributes->names[place];
        if (name->len != 4 || memcmp(name->ptr, "call", 4) || attributes->types[place] != XLA_FFI_AttrType_STRING)
            continue;
        const XLA_FFI_ByteSpan *key = attributes->attrs[place];
        return key->len == KEY ? key->ptr : NULL;
    }
    return NULL;
}

static XLA_FFI_Error *start(const XLA_FFI_CallFrame *frame, const Call *call, const Launch *one, char *const *bases,
                            void *stream) {
    uint64_t values[MOST_ARGUMENTS];
    void *table[MOST_ARGUMENTS];
    _Alignas(64) uint64_t maps[MOST_MAPS][MAP_WORDS];
    for (int32_t place = 0; place < one->maps; place++) {
        const Map *map = &one->map[place];
        int status = driver.encode(maps[place], map->type, map->rank, bases[map->base] + map->offset, map->shape,
                                   map->strides, map->box, map->steps, 0, map->swizzle, map->promotion, 0);
        if (status)
            return refused(frame, call->name, "making a tensor map", status);
    }
    for (int32_t place = 0; place < one->arguments; place++) {
        const Argument *argument = &one->argument[place];
        table[place] = &values[place];
        if (argument->kind == MAP)
            table[place] = maps[argument->base];
        else if (argument->kind == ADDRESS)
            values[place] = (uint64_t)(uintptr_t)(bases[argument->base] + argument->number);
        else
            values[place] = (uint64_t)argument->number;
    }
    int status = driver.launch(one->function, one->grid[0], one->grid[1], 1, one->threads, 1, 1, one->shared_bytes,
                               stream, table, NULL);
    return status ? refused(frame, call->name, "the launch", status) : NULL;
}

static XLA_FFI_Error *run(const XLA_FFI_CallFrame *frame, const Call *call, void *stream) {
    char *bases[MOST_ARRAYS];
    char text[512];
    int64_t arrays = frame->args.size + frame->rets.size;
    if (frame->args.size != call->operands || arrays != call->arrays) {
        snprintf(text, sizeof text, "%s takes %d operands and %d arrays, and XLA has %lld and %lld", call->name,
                 (int)call->operands, (int)call->arrays, (long long)frame->args.size, (long long)arrays);
        return failure(frame, text);
    }
    for (int64_t place = 0; place < arrays; place++) {
        int64_t result = place - frame->args.size;
        const XLA_FFI_Buffer *buffer = result < 0 ? frame->args.args[place] : frame->rets.rets[result];
        bases[place] = buffer->data;
        if ((uintptr_t)buffer->data % WIDEST) {
            snprintf(text, sizeof text, "%s: XLA passes an array at %p, which is no multiple of %d bytes", call->name,
                     buffer->data, WIDEST);
            return failure(frame, text);
        }
    }
    for (int32_t place = 0; place < call->launches; place++) {
        XLA_FFI_Error *error = start(frame, call, &call->launch[place], bases, stream);
        if (error)
            return error;
    }
    return NULL;
}

// Whether XLA asks what the handler is, which is then told.
static int asked(const XLA_FFI_CallFrame *frame, XLA_FFI_Handler_Traits traits) {
    if (!frame->extension_start || frame->extension_start->type != XLA_FFI_Extension_Metadata)
        return 0;
    XLA_FFI_Metadata *told = ((XLA_FFI_Metadata_Extension *)frame->extension_start)->metadata;
    told->api_version.major_version = XLA_FFI_API_MAJOR;
    told->api_version.minor_version = XLA_FFI_API_MINOR;
    told->traits = traits;
    return 1;
}

SHARED XLA_FFI_Error *fusegen_call(XLA_FFI_CallFrame *frame) {
    if (asked(frame, XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE))
        return NULL;
    const char *key = key_in(&frame->attrs);
    if (!key)
        return failure(frame, "a custom call to fusegen has no attribute 'call' of ours: another version made it");
    XLA_FFI_Stream_Get_Args on = {.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE, .ctx = frame->ctx};
    XLA_FFI_Error *error = frame->api->XLA_FFI_Stream_Get(&on);
    if (error)
        return error;
    void *context = NULL, *before = NULL;
    int status = driver.context_of(on.stream, &context);
    if (status)
        return refused(frame, "fusegen", "asking for the stream's context", status);
    const Call *call = found(key, context);
    if (!call) {
        char text[512];
        snprintf(text, sizeof text,
                 "this process knows no call %.*s on this GPU: the program was compiled in another one\n"
                 "  trace and compile it here; kernels come from fusegen's cache",
                 KEY, key);
        return failure(frame, text);
    }
    if (driver.current(&before) || before != context) { // of a thread that XLA has not readied for this GPU
        if ((status = driver.push(context)))
            return refused(frame, call->name, "making its GPU current", status);
        error = run(frame, call, on.stream);
        driver.pop(&before);
        return error;
    }
    return run(frame, call, on.stream);
}

// ---------------------------------------------------------------- on the CPU

static XLA_FFI_Error *(*python)(XLA_FFI_CallFrame *frame);
static atomic_int running, closed;

SHARED void fusegen_python(XLA_FFI_Error *(*function)(XLA_FFI_CallFrame *frame)) { python = function; }

// From now on no call begins; how many still run.
SHARED int fusegen_close(void) {
    atomic_store(&closed, 1);
    return atomic_load(&running);
}

SHARED XLA_FFI_Error *fusegen_emulate(XLA_FFI_CallFrame *frame) {
    if (asked(frame, 0))
        return NULL;
    atomic_fetch_add(&running, 1); // before the question, so that whoever closes sees who got in
    XLA_FFI_Error *error = atomic_load(&closed) ? failure(frame, "Python is ending") : python(frame);
    atomic_fetch_sub(&running, 1);
    return error;
}
