// A shortcut (fusegen/runtime/shortcuts.py) in C: a call that repeats an earlier one, without the time that Python takes
// for it. It knows neither torch nor CUDA: it gets functions of torch, and the launch's memory written beforehand, all
// but the stream, the addresses and the run-time numbers (fusegen/runtime/devices.py, Block). Where there are functions
// in C++ that read torch's tensors (guards.cpp), it asks torch no more than once: of the first call that its guards let
// pass it has noted what those that follow must be like, and how the results were made.
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
typedef int (*StreamOf)(int32_t device, Word *stream);  // aoti_torch_get_current_cuda_stream

// Of guards.cpp, once `read_by` was told where they are.
typedef Py_ssize_t (*Write)(PyObject *const *tensors, Py_ssize_t count, int64_t *numbers);
static Write note, form;
static int (*alike)(PyObject *const *tensors, Py_ssize_t count, const int64_t *traits, Word *addresses);
static int (*unwatched)(PyObject *const *tensors, Py_ssize_t count);
static PyObject *(*make_like)(const int64_t **forms, Word *address);

static PyObject *is_nested, *word_out, *word_stream;  // the words

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *otherwise;  // takes every call that is not like the earlier one
    PyObject *given;      // the constructor's arguments, which own everything below

    PyObject *like;            // like(*tensors): whether torch finds them to be as those were
    PyObject *current_device;  // current_device(): the current one's number; None where there is but one
    PyObject *current_stream;  // current_stream(place)
    StreamOf stream_of;        // the same in C; NULL where there is none
    PyObject *place;           // the number of the device
    int32_t device;            // the same in C
    PyObject *address;         // address(tensor)
    PyObject *types;           // of every array, as `spans`
    PyObject *numbers;         // for each operand: what makes a run-time number of it, None for a tensor
    PyObject *empty;           // empty(*fresh[i]): memory for output i
    PyObject *fresh;
    int filling;               // whether `out=` is given
    int operator;              // whether it stands before torch's dispatcher, for calls of which nobody else is to know
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

    // as C++ has them; NULL before the first call that `like` let pass
    int64_t *traits;  // of like tensors
    int64_t *forms;   // of the outputs that `empty` made
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

// `out=` of a call, NULL where it is none. 0 for other keywords, and for a stream of one's choice. Words in a program's
// text are the same objects everywhere; a call with words made otherwise is handed on.
static int keywords(PyObject *names, PyObject *const *values, PyObject **out)
{
    *out = NULL;
    for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i), *value = values[i] == Py_None ? NULL : values[i];
        if (name == word_out)
            *out = value;
        else if (value || name != word_stream)
            return 0;
    }
    return 1;
}

// ---------------------------------------------------------------- the call

static PyObject *const *items(Shortcut *self, PyObject *const *outputs)
{
    return self->outputs == 1 ? outputs : PySequence_Fast_ITEMS(*outputs);
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

// What C++ writes down of tensors; NULL where it can't, or without memory, so that torch will be asked again.
static int64_t *written(Write write, PyObject *const *tensors, Py_ssize_t count)
{
    Py_ssize_t size = write(tensors, count, NULL);
    int64_t *numbers = size < 0 ? NULL : PyMem_Malloc(size * sizeof *numbers);
    if (numbers && write(tensors, count, numbers) != size) {
        PyMem_Free(numbers);
        return NULL;
    }
    return numbers;
}

// Whether the tensors given are like those were, and their addresses: 1, 0, or -1 for an exception.
static int look(Shortcut *self, PyObject *const *tensors, Py_ssize_t count, Word *addresses)
{
    if (!of_types(self, tensors, 0, count))
        return 0;
    if (self->operator && !(unwatched && unwatched(tensors, count)))
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
        self->traits = written(note, tensors, count);
    return read_addresses(self, tensors, count, addresses) < 0 ? -1 : 1;
}

// Fresh memory for output `i`, and its address. `forms` goes on to the next one, or to NULL where C++ can't.
static PyObject *fresh(Shortcut *self, Py_ssize_t i, const int64_t **forms, Word *address)
{
    PyObject *made = *forms ? make_like(forms, address) : NULL;
    if (made)
        return made;
    PyErr_Clear();
    *forms = NULL;
    made = PyObject_Call(self->empty, PyTuple_GET_ITEM(self->fresh, i), NULL);
    if (made && read_addresses(self, &made, 1, address) < 0)
        Py_CLEAR(made);
    return made;
}

// The output, or a tuple of them, and their addresses; None for none.
static PyObject *allocate(Shortcut *self, Word *addresses)
{
    if (!self->outputs)
        Py_RETURN_NONE;
    const int64_t *forms = self->forms;
    PyObject *made = self->outputs == 1 ? fresh(self, 0, &forms, addresses) : PyTuple_New(self->outputs);
    for (Py_ssize_t i = 0; made && self->outputs > 1 && i < self->outputs; i++) {
        PyObject *one = fresh(self, i, &forms, addresses + i);
        if (one)
            PyTuple_SET_ITEM(made, i, one);
        else
            Py_CLEAR(made);
    }
    if (made && self->traits && !self->forms
        && of_types(self, items(self, &made), self->arrays - self->outputs, self->outputs))
        self->forms = written(form, items(self, &made), self->outputs);
    return made;
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

static int ask_stream(Shortcut *self, Word *stream)
{
    if (self->stream_of && !self->stream_of(self->device, stream))
        return 0;
    return integer(PyObject_CallOneArg(self->current_stream, self->place), stream);
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

// Whether `out=` is as it was: not there, a tensor, or a tuple of as many.
static int fits(Shortcut *self, PyObject *out)
{
    if (!self->filling)
        return !out;
    return out && (self->outputs == 1 || (PyTuple_CheckExact(out) && PyTuple_GET_SIZE(out) == self->outputs));
}

// 1: launched, and `outputs` a new reference: to `out` where results go to `outs`. 0: not a call like that one. -1: an
// exception.
static int attempt(
    Shortcut *self, PyObject *const *operands, PyObject *const *outs, PyObject *out, PyObject **outputs)
{
    Py_ssize_t inputs = 0, read = self->arrays - (self->filling ? 0 : self->outputs);
    PyObject *tensors[self->arrays + 1];
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->numbers); i++)
        if (PyTuple_GET_ITEM(self->numbers, i) == Py_None)
            tensors[inputs++] = operands[i];
    if (self->filling)
        memcpy(tensors + inputs, outs, self->outputs * sizeof *tensors);

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
    PyObject *made = self->filling ? Py_NewRef(out) : allocate(self, addresses + inputs);
    if (!made)
        return -1;
    if (ask_stream(self, words + self->stream) < 0 || launch(self, words) < 0) {
        Py_DECREF(made);
        return -1;
    }
    *outputs = made;
    return 1;
}

// As a method of the kernel is called: `given` is the kernel and then the operands. An operator of torch takes its
// outputs behind these, and returns None.
static PyObject *call(PyObject *object, PyObject *const *given, size_t flags, PyObject *names)
{
    Shortcut *self = (Shortcut *)object;
    Py_ssize_t count = PyVectorcall_NARGS(flags), own = 1 + PyTuple_GET_SIZE(self->numbers);
    PyObject *out, *outputs = NULL;
    int taken = 0;
    Py_INCREF(self);  // while it runs, its kernel may put others in its place
    if (self->operator && self->filling) {
        if (count == own + self->outputs && !names)
            taken = attempt(self, given + 1, given + own, Py_None, &outputs);
    } else if (count == own && keywords(names, given + count, &out) && fits(self, out)) {
        taken = attempt(self, given + 1, out ? items(self, &out) : NULL, out, &outputs);
    }
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
    unsigned long long mask, stream_of, start, function;
    if (names || !PyArg_ParseTuple(
            given, "OOOKOiOO!O!OO!ppy#Ky#nny#KKO", &self->like, &self->current_device, &self->current_stream, &stream_of,
            &self->place, &self->device, &self->address, &PyTuple_Type, &self->types, &PyTuple_Type, &self->numbers,
            &self->empty, &PyTuple_Type, &self->fresh, &self->filling, &self->operator, &self->spans, &spans, &mask, &self->words,
            &words, &self->stream, &self->first, &self->places, &places, &start, &function, &self->again)) {
        Py_DECREF(self);
        return NULL;
    }
    self->arrays = spans / (Py_ssize_t)sizeof(Span);
    self->outputs = PyTuple_GET_SIZE(self->fresh);
    self->mask = mask;
    self->size = words / (Py_ssize_t)sizeof(Word);
    self->params = places / (Py_ssize_t)sizeof(Word);
    self->stream_of = (StreamOf)(uintptr_t)stream_of;
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
    PyMem_Free(self->forms);
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

// `give` of guards.py is the one caller, and vouches for all.
static PyObject *read_by(PyObject *module, PyObject *given)
{
    (void)module;
    unsigned long long noting, comparing, looking, forming, making;
    if (!PyArg_ParseTuple(given, "KKKKK", &noting, &comparing, &looking, &forming, &making))
        return NULL;
    alike = (int (*)(PyObject *const *, Py_ssize_t, const int64_t *, Word *))(uintptr_t)comparing;
    unwatched = (int (*)(PyObject *const *, Py_ssize_t))(uintptr_t)looking;
    form = (Write)(uintptr_t)forming;
    make_like = (PyObject *(*)(const int64_t **, Word *))(uintptr_t)making;
    note = (Write)(uintptr_t)noting;
    Py_RETURN_NONE;
}

// Whether shortcuts can tell who watches torch's operators.
static PyObject *sees(PyObject *module, PyObject *given)
{
    (void)module, (void)given;
    return PyBool_FromLong(unwatched != NULL);
}

static PyMethodDef functions[] = {
    {"read_by", read_by, METH_VARARGS, "Let shortcuts read and make tensors by guards.cpp, whose functions are there."},
    {"sees", sees, METH_NOARGS, "Whether shortcuts can tell who watches torch's operators."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "shortcut", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit_shortcut(void)
{
    is_nested = PyUnicode_InternFromString("is_nested");
    word_out = PyUnicode_InternFromString("out");
    word_stream = PyUnicode_InternFromString("stream");
    PyObject *module = is_nested && word_out && word_stream ? PyModule_Create(&definition) : NULL;
    if (module && PyModule_AddType(module, &ShortcutType) < 0)
        Py_CLEAR(module);
    return module;
}
