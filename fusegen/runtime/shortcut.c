// A shortcut (fusegen/runtime/shortcuts.py) in C: a call that repeats an earlier one, without the time that Python takes
// for it. It knows neither torch nor CUDA: it gets functions of torch, and the launch's memory written beforehand, all
// but the stream, the addresses and the run-time numbers (fusegen/runtime/devices.py, Block). Where there are functions
// in C++ that read torch's tensors (guards.cpp), it asks torch's guards no more than once: of the first call that they let
// pass it has noted what those that follow must be like.
//
// Each call has that memory on its own stack, so that any number of threads may make one at the same time.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef uint64_t Word;  // an argument of a launch, whatever its type

typedef struct {
    Word offset;  // of the address from a multiple of the widest vector
    Word bytes;
} Span;

typedef int (*Launch)(const Word *config, void *function, Word **arguments, void **extra);  // cuLaunchKernelEx

// Of guards.cpp, once `read_by` was told where they are.
static Py_ssize_t (*note)(PyObject *const *tensors, Py_ssize_t count, int64_t *traits);
static int (*alike)(PyObject *const *tensors, Py_ssize_t count, const int64_t *traits, Word *addresses);

static PyObject *is_nested;  // the word

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *otherwise;  // takes every call that is not like the earlier one
    PyObject *given;      // the constructor's arguments, which own everything below

    PyObject *like;            // like(*tensors): whether torch finds them to be as those were
    PyObject *current_device;  // current_device(): the current one's number; None where there is but one
    PyObject *current_stream;  // current_stream(place)
    PyObject *place;           // the number of the device
    PyObject *address;         // address(tensor)
    PyObject *types;           // of every array, as `spans`
    PyObject *numbers;         // for each operand: what makes a run-time number of it, None for a tensor
    PyObject *empty;           // empty(*fresh[i]): memory for output i
    PyObject *fresh;
    int filling;               // whether `out=` is given
    const Span *spans;         // of every array: inputs, then outputs
    Py_ssize_t arrays, outputs;
    Word mask;  // of an address: what `offset` was taken from

    const Word *words;  // CUlaunchConfig, and the arguments
    Py_ssize_t size;
    Py_ssize_t stream, first;  // where the stream is, and the first address; run-time numbers follow the last one
    const Word *places;        // where each parameter's argument is
    Py_ssize_t params;
    Launch launch;
    void *function;
    PyObject *again;  // again(words): launches with all care

    int64_t *traits;  // of like tensors, as `note` has them; NULL before the first call that `like` let pass
} Shortcut;

// ---------------------------------------------------------------- what Python's objects say; -1 is an exception

static int truth(PyObject *found)
{
    int answer = found ? PyObject_IsTrue(found) : -1;
    Py_XDECREF(found);
    return answer;
}

static int integer(PyObject *found, Word *word)
{
    *word = found ? PyLong_AsUnsignedLongLong(found) : 0;
    Py_XDECREF(found);
    return PyErr_Occurred() ? -1 : 0;
}

// A run-time number: f32 comes as a float, i32 as an int.
static int number(PyObject *found, Word *word)
{
    if (found && PyFloat_Check(found)) {
        float value = (float)PyFloat_AS_DOUBLE(found);
        memcpy(word, &value, sizeof value);
    } else if (found) {
        int32_t value = (int32_t)PyLong_AsLong(found);
        memcpy(word, &value, sizeof value);
    }
    Py_XDECREF(found);
    return PyErr_Occurred() ? -1 : 0;
}

// `out=` of a call, NULL where it is none. 0 for other keywords, and for a stream of one's choice.
static int keywords(PyObject *names, PyObject *const *values, PyObject **out)
{
    *out = NULL;
    for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i), *value = values[i] == Py_None ? NULL : values[i];
        if (PyUnicode_CompareWithASCIIString(name, "out") == 0)
            *out = value;
        else if (value || PyUnicode_CompareWithASCIIString(name, "stream") != 0)
            return 0;
    }
    return 1;
}

// ---------------------------------------------------------------- the call

static PyObject *const *items(Shortcut *self, PyObject *const *outputs)
{
    return self->outputs == 1 ? outputs : PySequence_Fast_ITEMS(*outputs);
}

// The output, or a tuple of them.
static PyObject *allocate(Shortcut *self)
{
    if (self->outputs == 1)
        return PyObject_Call(self->empty, PyTuple_GET_ITEM(self->fresh, 0), NULL);
    PyObject *made = PyTuple_New(self->outputs);
    for (Py_ssize_t i = 0; made && i < self->outputs; i++) {
        PyObject *one = PyObject_Call(self->empty, PyTuple_GET_ITEM(self->fresh, i), NULL);
        if (one)
            PyTuple_SET_ITEM(made, i, one);
        else
            Py_CLEAR(made);
    }
    return made;
}

static int read_addresses(Shortcut *self, PyObject *const *tensors, Py_ssize_t count, Word *addresses)
{
    for (Py_ssize_t i = 0; i < count; i++)
        if (integer(PyObject_CallOneArg(self->address, tensors[i]), &addresses[i]) < 0)
            return -1;
    return 0;
}

// Whether the arrays from number `first` on are of the classes that they were.
static int of_types(Shortcut *self, PyObject *const *tensors, Py_ssize_t first, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        if ((PyObject *)Py_TYPE(tensors[i]) != PyTuple_GET_ITEM(self->types, first + i))
            return 0;
    return 1;
}

// What the tensors that torch's guards have let pass are like. Without memory for it they will be asked again.
static void learn(Shortcut *self, PyObject *const *tensors, Py_ssize_t count)
{
    Py_ssize_t size = note(tensors, count, NULL);
    int64_t *traits = size < 0 ? NULL : PyMem_Malloc(size * sizeof *traits);
    if (traits && note(tensors, count, traits) != size) {
        PyMem_Free(traits);
        traits = NULL;
    }
    self->traits = traits;
}

// Whether the tensors given are like those were, and their addresses: 1, 0, or -1 for an exception.
static int look(Shortcut *self, PyObject *const *tensors, Py_ssize_t count, Word *addresses)
{
    if (!of_types(self, tensors, 0, count))
        return 0;
    if (self->traits)
        return alike(tensors, count, self->traits, addresses);
    for (Py_ssize_t i = 0; i < count; i++) {  // a nested one has no sizes: torch's guards would abort the process
        int nested = truth(PyObject_GetAttr(tensors[i], is_nested));
        if (nested)
            return nested < 0 ? -1 : 0;
    }
    int like = truth(PyObject_Vectorcall(self->like, tensors, count, NULL));
    if (like <= 0)
        return like;
    if (note && !self->traits)
        learn(self, tensors, count);
    return read_addresses(self, tensors, count, addresses) < 0 ? -1 : 1;
}

// The addresses of outputs that `empty` made.
static int locate(Shortcut *self, PyObject *const *made, Word *addresses)
{
    if (self->traits && of_types(self, made, self->arrays - self->outputs, self->outputs)
        && alike(made, self->outputs, NULL, addresses))
        return 0;
    return read_addresses(self, made, self->outputs, addresses);
}

// Whether every address is as far beyond a multiple of the widest vector as it was.
static int as_aligned(Shortcut *self, const Word *addresses, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        if ((addresses[i] & self->mask) != self->spans[i].offset)
            return 0;
    return 1;
}

// Whether no output may have bytes of another array; torch has no negative strides: an array begins at its address.
static int apart(Shortcut *self, const Word *addresses)
{
    for (Py_ssize_t out = self->arrays - self->outputs; out < self->arrays; out++)
        for (Py_ssize_t other = 0; other < out; other++)
            if (addresses[out] < addresses[other] + self->spans[other].bytes
                && addresses[other] < addresses[out] + self->spans[out].bytes)
                return 0;
    return 1;
}

// The GPU's queue may be full: other threads run while the driver waits for it.
static int launch(Shortcut *self, Word *words)
{
    Word *arguments[self->params];
    for (Py_ssize_t i = 0; i < self->params; i++)
        arguments[i] = words + self->places[i];
    int refused;
    Py_BEGIN_ALLOW_THREADS
    refused = self->launch(words, self->function, arguments, NULL);
    Py_END_ALLOW_THREADS
    if (!refused)
        return 0;
    return truth(PyObject_CallFunction(self->again, "y#", words, self->size * sizeof(Word))) < 0 ? -1 : 0;
}

// 1: launched, and `outputs` a new reference. 0: not a call like that one. -1: an exception.
static int attempt(Shortcut *self, PyObject *const *operands, PyObject *out, PyObject **outputs)
{
    if (self->filling ? !out || (self->outputs > 1 && (!PyTuple_CheckExact(out) || PyTuple_GET_SIZE(out) != self->outputs))
                      : out != NULL)
        return 0;
    Py_ssize_t inputs = 0, read = self->arrays - (self->filling ? 0 : self->outputs);
    PyObject *tensors[self->arrays];
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->numbers); i++)
        if (PyTuple_GET_ITEM(self->numbers, i) == Py_None)
            tensors[inputs++] = operands[i];
    if (self->filling)
        memcpy(tensors + inputs, items(self, &out), self->outputs * sizeof *tensors);

    Word words[self->size], *addresses = words + self->first, *value = addresses + self->arrays;
    memcpy(words, self->words, sizeof words);
    int like = look(self, tensors, read, addresses);
    if (like <= 0)
        return like;
    if (!as_aligned(self, addresses, read) || (self->filling && !apart(self, addresses)))
        return 0;
    if (self->current_device != Py_None) {
        PyObject *current = PyObject_CallNoArgs(self->current_device);
        int here = current ? PyObject_RichCompareBool(current, self->place, Py_EQ) : -1;
        Py_XDECREF(current);
        if (here <= 0)
            return here;
    }

    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->numbers); i++) {
        PyObject *reads = PyTuple_GET_ITEM(self->numbers, i);
        if (reads != Py_None && number(PyObject_CallOneArg(reads, operands[i]), value++) < 0)
            return -1;
    }
    PyObject *made = self->filling ? Py_NewRef(out) : allocate(self);
    if (!made)
        return -1;
    if ((!self->filling && locate(self, items(self, &made), addresses + inputs) < 0)
        || integer(PyObject_CallOneArg(self->current_stream, self->place), words + self->stream) < 0
        || launch(self, words) < 0) {
        Py_DECREF(made);
        return -1;
    }
    *outputs = made;
    return 1;
}

static PyObject *call(PyObject *object, PyObject *const *given, size_t flags, PyObject *names)
{
    Shortcut *self = (Shortcut *)object;
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    PyObject *out, *outputs = NULL;
    int taken = 0;
    Py_INCREF(self);  // while it runs, its kernel may put others in its place
    if (count == PyTuple_GET_SIZE(self->numbers) && keywords(names, given + count, &out))
        taken = attempt(self, given, out, &outputs);
    if (!taken) {
        PyObject *otherwise = Py_NewRef(self->otherwise);
        outputs = PyObject_Vectorcall(otherwise, given, flags, names);
        Py_DECREF(otherwise);
    }
    Py_DECREF(self);
    return outputs;
}

// ---------------------------------------------------------------- the type

// `in_c` of shortcuts.py is the one caller, and vouches for sizes and places.
static PyObject *make(PyTypeObject *type, PyObject *given, PyObject *names)
{
    Shortcut *self = (Shortcut *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->call = call;
    self->otherwise = Py_NewRef(Py_None);
    self->given = Py_NewRef(given);
    Py_ssize_t spans, words, places;
    unsigned long long mask, start, function;
    if (names || !PyArg_ParseTuple(
            given, "OOOOOO!O!OO!py#Ky#nny#KKO", &self->like, &self->current_device, &self->current_stream, &self->place,
            &self->address, &PyTuple_Type, &self->types, &PyTuple_Type, &self->numbers, &self->empty, &PyTuple_Type,
            &self->fresh, &self->filling, &self->spans, &spans, &mask, &self->words, &words, &self->stream, &self->first,
            &self->places, &places, &start, &function, &self->again)) {
        Py_DECREF(self);
        return NULL;
    }
    self->arrays = spans / (Py_ssize_t)sizeof(Span);
    self->outputs = PyTuple_GET_SIZE(self->fresh);
    self->mask = mask;
    self->size = words / (Py_ssize_t)sizeof(Word);
    self->params = places / (Py_ssize_t)sizeof(Word);
    self->launch = (Launch)(uintptr_t)start;
    self->function = (void *)(uintptr_t)function;
    return (PyObject *)self;
}

static PyObject *hand_on(Shortcut *self, PyObject *otherwise)
{
    Py_SETREF(self->otherwise, Py_NewRef(otherwise));
    Py_RETURN_NONE;
}

static int traverse(Shortcut *self, visitproc visit, void *arg)
{
    Py_VISIT(self->otherwise);
    Py_VISIT(self->given);
    return 0;
}

// What was given is older than the shortcut, so that no cycle is without an `otherwise`.
static int clear(Shortcut *self)
{
    Py_SETREF(self->otherwise, Py_NewRef(Py_None));
    return 0;
}

static void drop(Shortcut *self)
{
    PyObject_GC_UnTrack(self);
    Py_DECREF(self->otherwise);
    Py_DECREF(self->given);
    PyMem_Free(self->traits);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef methods[] = {
    {"hand_on", (PyCFunction)hand_on, METH_O, "Let `otherwise` take the calls that are not like the earlier one."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject ShortcutType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "fusegen.Shortcut",
    .tp_basicsize = sizeof(Shortcut),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = make,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Shortcut, call),
    .tp_methods = methods,
    .tp_traverse = (traverseproc)traverse,
    .tp_clear = (inquiry)clear,
    .tp_dealloc = (destructor)drop,
};

// `give` of guards.py is the one caller, and vouches for both.
static PyObject *read_by(PyObject *module, PyObject *given)
{
    (void)module;
    unsigned long long noting, comparing;
    if (!PyArg_ParseTuple(given, "KK", &noting, &comparing))
        return NULL;
    note = (Py_ssize_t(*)(PyObject *const *, Py_ssize_t, int64_t *))(uintptr_t)noting;
    alike = (int (*)(PyObject *const *, Py_ssize_t, const int64_t *, Word *))(uintptr_t)comparing;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"read_by", read_by, METH_VARARGS, "Let shortcuts read tensors by `note` and `alike` of guards.cpp, at these addresses."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "shortcut", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit_shortcut(void)
{
    PyObject *module = (is_nested = PyUnicode_InternFromString("is_nested")) ? PyModule_Create(&definition) : NULL;
    if (module && PyModule_AddType(module, &ShortcutType) < 0)
        Py_CLEAR(module);
    return module;
}
