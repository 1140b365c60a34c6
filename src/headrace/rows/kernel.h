/* What the files of the kernel share: types, and the buffers that Python passes in. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* Neighbours' files may hold tokens at odd addresses. */
typedef uint16_t u16 __attribute__((aligned(1)));
typedef uint32_t u32 __attribute__((aligned(1)));
typedef uint64_t u64 __attribute__((aligned(1)));
typedef int8_t i8;
typedef int16_t i16 __attribute__((aligned(1)));
typedef int32_t i32 __attribute__((aligned(1)));
typedef int64_t i64 __attribute__((aligned(1)));
typedef uint8_t u8;

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

/* Buffers of one call, released together. */
typedef struct {
    Py_buffer views[32];
    int count;
} Held;

static inline void release(Held *held) {
    while (held->count) PyBuffer_Release(&held->views[--held->count]);
}

/* A flat buffer of `itemsize` bytes an item (0: any), to be released by the caller unless this returns NULL. */
static inline void *take_view(Py_buffer *view, PyObject *object, Py_ssize_t itemsize, int writable, Py_ssize_t *items,
                              const char *name) {
    *items = 0;
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0)))
        return NULL;
    /* Whole numbers, or bytes: anything else of the same size would be read as something it is not. */
    const char *format = view->format ? view->format : "B";
    if (*format == '<' || *format == '=' || *format == '@') format++;
    if (!*format || format[1] || !strchr("?bBhHiIlLqQ", *format)) {
        PyErr_Format(PyExc_ValueError, "%s: items of format '%s' are no whole numbers", name, view->format);
        PyBuffer_Release(view);
        return NULL;
    }
    if (itemsize && view->itemsize != itemsize) {
        PyErr_Format(PyExc_ValueError, "%s: items of %zd bytes, expected %zd", name, view->itemsize, itemsize);
        PyBuffer_Release(view);
        return NULL;
    }
    *items = view->len / (view->itemsize ? view->itemsize : 1);
    return view->buf ? view->buf : (void *)view;
}

/* The same for one of the buffers of a call. None gives NULL, which only outputs may be. */
static inline void *take(Held *held, PyObject *object, Py_ssize_t itemsize, int writable, Py_ssize_t *items,
                         const char *name) {
    *items = 0;
    if (object == Py_None) {
        if (!writable) PyErr_Format(PyExc_ValueError, "%s: missing", name);
        return NULL;
    }
    void *taken = take_view(&held->views[held->count], object, itemsize, writable, items, name);
    if (taken) held->count++;
    return taken;
}

/* Any number of tables of int64, given as a tuple. */
typedef struct {
    Py_buffer *views;
    const int64_t **table;
    Py_ssize_t *items;
    Py_ssize_t count;
} Tables;

static inline void release_tables(Tables *tables) {
    while (tables->count) PyBuffer_Release(&tables->views[--tables->count]);
    PyMem_Free(tables->views);
    PyMem_Free(tables->table);
    PyMem_Free(tables->items);
}

static inline int take_tables(Tables *tables, PyObject *objects) {
    *tables = (Tables){NULL, NULL, NULL, 0};
    if (!PyTuple_Check(objects)) {
        PyErr_SetString(PyExc_ValueError, "tables: must be a tuple");
        return 0;
    }
    size_t count = (size_t)PyTuple_Size(objects);
    tables->views = PyMem_Malloc(count * sizeof *tables->views);
    tables->table = PyMem_Malloc(count * sizeof *tables->table);
    tables->items = PyMem_Malloc(count * sizeof *tables->items);
    if (!tables->views || !tables->table || !tables->items) {
        PyErr_NoMemory();
        return 0;
    }
    for (size_t i = 0; i < count; i++, tables->count++) {
        PyObject *object = PyTuple_GetItem(objects, (Py_ssize_t)i);
        tables->table[i] = take_view(&tables->views[i], object, 8, 0, &tables->items[i], "tables");
        if (!tables->table[i]) return 0;
    }
    return 1;
}

#define TAKE(pointer, object, itemsize, writable, items)                                                     \
    pointer = take(&held, object, itemsize, writable, items, #pointer);                                      \
    if (PyErr_Occurred()) goto fail;

#define NEED(condition, message)                                                                             \
    if (!(condition)) {                                                                                      \
        PyErr_SetString(PyExc_ValueError, message);                                                          \
        goto fail;                                                                                           \
    }

/* The last of `count` ascending starts, `step` numbers apart, that is at most `number`; the first if there is none.
   Without a branch, since the processor would guess it wrong every other time. */
static inline int64_t last_at_most(const int64_t *starts, int64_t step, int64_t count, int64_t number) {
    int64_t low = 0;
    while (count > 1) {
        int64_t half = count / 2;
        low += starts[(low + half) * step] <= number ? half : 0;
        count -= half;
    }
    return low;
}

#pragma GCC visibility push(hidden)
PyObject *bounds(PyObject *self, PyObject *args);
PyObject *locate(PyObject *self, PyObject *args);
PyObject *copy(PyObject *self, PyObject *args);
PyObject *search(PyObject *self, PyObject *args);
PyObject *look_up(PyObject *self, PyObject *args);
PyObject *permute(PyObject *self, PyObject *args);
PyObject *pack(PyObject *self, PyObject *args);
PyObject *plan(PyObject *self, PyObject *args);
PyObject *count_rows(PyObject *self, PyObject *args);
PyObject *fill(PyObject *self, PyObject *args);
#pragma GCC visibility pop
