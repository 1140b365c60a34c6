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

/* A flat buffer of `itemsize` bytes an item (0: any). None gives NULL, which only outputs may be. */
static inline void *take(Held *held, PyObject *object, Py_ssize_t itemsize, int writable, Py_ssize_t *items,
                         const char *name) {
    *items = 0;
    if (object == Py_None) {
        if (!writable) PyErr_Format(PyExc_ValueError, "%s: missing", name);
        return NULL;
    }
    Py_buffer *view = &held->views[held->count];
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0)))
        return NULL;
    held->count++;
    /* Whole numbers, or bytes: anything else of the same size would be read as something it is not. */
    const char *format = view->format ? view->format : "B";
    if (*format == '<' || *format == '=' || *format == '@') format++;
    if (!*format || format[1] || !strchr("?bBhHiIlLqQ", *format)) {
        PyErr_Format(PyExc_ValueError, "%s: items of format '%s' are no whole numbers", name, view->format);
        return NULL;
    }
    if (itemsize && view->itemsize != itemsize) {
        PyErr_Format(PyExc_ValueError, "%s: items of %zd bytes, expected %zd", name, view->itemsize, itemsize);
        return NULL;
    }
    *items = view->len / (view->itemsize ? view->itemsize : 1);
    return view->buf ? view->buf : (void *)held;
}

#define TAKE(pointer, object, itemsize, writable, items)                                                     \
    pointer = take(&held, object, itemsize, writable, items, #pointer);                                      \
    if (PyErr_Occurred()) goto fail;

#define NEED(condition, message)                                                                             \
    if (!(condition)) {                                                                                      \
        PyErr_SetString(PyExc_ValueError, message);                                                          \
        goto fail;                                                                                           \
    }

/* The last of `count` ascending starts that is at most `number`; the first if there is none. Without a branch, since
   the processor would guess it wrong every other time. */
static inline int64_t last_at_most(const int64_t *starts, int64_t count, int64_t number) {
    int64_t low = 0;
    while (count > 1) {
        int64_t half = count / 2;
        low += starts[low + half] <= number ? half : 0;
        count -= half;
    }
    return low;
}

#pragma GCC visibility push(hidden)
PyObject *bounds(PyObject *self, PyObject *args);
PyObject *locate(PyObject *self, PyObject *args);
PyObject *copy(PyObject *self, PyObject *args);
PyObject *search(PyObject *self, PyObject *args);
PyObject *permute(PyObject *self, PyObject *args);
PyObject *pack(PyObject *self, PyObject *args);
PyObject *fill(PyObject *self, PyObject *args);
#pragma GCC visibility pop
