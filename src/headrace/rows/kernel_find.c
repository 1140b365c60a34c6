/* Where documents lie in memory, and copying them end to end. */

#include "kernel.h"

/* bounds(record, part, first_record, offsets, elements, begin, end): where each record's elements lie within
   its part. -> -1, or the number of the first record whose offsets are damaged. */
PyObject *bounds(PyObject *self, PyObject *args) {
    PyObject *o[7];
    if (!PyArg_ParseTuple(args, "OOOOOOO", &o[0], &o[1], &o[2], &o[3], &o[4], &o[5], &o[6])) return NULL;
    Held held = {.count = 0};
    Py_ssize_t n, n2, parts, p2, p3, n3, n4;
    const int64_t *record, *part, *first_record, *elements;
    const uint64_t *offsets;
    int64_t *begin, *end;
    TAKE(record, o[0], 8, 0, &n)
    TAKE(part, o[1], 8, 0, &n2)
    TAKE(first_record, o[2], 8, 0, &parts)
    TAKE(offsets, o[3], 8, 0, &p2)
    TAKE(elements, o[4], 8, 0, &p3)
    TAKE(begin, o[5], 8, 1, &n3)
    TAKE(end, o[6], 8, 1, &n4)
    NEED(n == n2 && n == n3 && n == n4 && p2 + 1 == parts && p2 == p3, "arrays differ in length")
    Py_ssize_t bad = -1;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t p = part[i];
        if (p < 0 || p >= p2 || record[i] < first_record[p] || record[i] >= first_record[p + 1] || !offsets[p]) {
            bad = i;
            break;
        }
        const u64 *at = (const u64 *)(uintptr_t)offsets[p] + (record[i] - first_record[p]);
        if (at[0] > at[1] || at[1] > (uint64_t)elements[p]) {
            bad = i;
            break;
        }
        begin[i] = (int64_t)at[0];
        end[i] = (int64_t)at[1];
    }
    Py_END_ALLOW_THREADS
    release(&held);
    return PyLong_FromSsize_t(bad);
fail:
    release(&held);
    return NULL;
}

/* locate(record, start, length, whole, first_record, offsets, values, elements, itemsize, address, more): where
   `length` elements of each record lie in memory, from its `start` on, if it is `whole` elements long as expected,
   and whether the record goes on after them. -> -1, or the number of the first one that cannot be found: its
   part is not loaded, or its offsets are damaged, or its length is another. */
PyObject *locate(PyObject *self, PyObject *args) {
    PyObject *o[10];
    long long itemsize;
    if (!PyArg_ParseTuple(args, "OOOOOOOOLOO", &o[0], &o[1], &o[2], &o[3], &o[4], &o[5], &o[6], &o[7], &itemsize,
                          &o[8], &o[9]))
        return NULL;
    Held held = {.count = 0};
    Py_ssize_t n, n2, n3, n4, bounds_count, parts, p2, p3, n5, n6;
    const int64_t *record, *start, *length, *whole, *first_record, *elements;
    const uint64_t *offsets, *values;
    uint64_t *address;
    uint8_t *more;
    TAKE(record, o[0], 8, 0, &n)
    TAKE(start, o[1], 8, 0, &n2)
    TAKE(length, o[2], 8, 0, &n3)
    TAKE(whole, o[3], 8, 0, &n4)
    TAKE(first_record, o[4], 8, 0, &bounds_count)
    TAKE(offsets, o[5], 8, 0, &parts)
    TAKE(values, o[6], 8, 0, &p2)
    TAKE(elements, o[7], 8, 0, &p3)
    TAKE(address, o[8], 8, 1, &n5)
    TAKE(more, o[9], 1, 1, &n6)
    NEED(n == n2 && n == n3 && n == n4 && n == n5 && n == n6, "arrays of pieces differ in length")
    NEED(parts + 1 == bounds_count && parts == p2 && parts == p3, "arrays of parts differ in length")
    Py_ssize_t bad = -1;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t low = last_at_most(first_record, 1, parts, record[i]);
        bad = i;
        if (!parts || record[i] < first_record[low] || record[i] >= first_record[low + 1] || !offsets[low] || !values[low])
            break;
        const u64 *at = (const u64 *)(uintptr_t)offsets[low] + (record[i] - first_record[low]);
        if (at[0] > at[1] || at[1] > (uint64_t)elements[low] || at[1] - at[0] != (uint64_t)whole[i]) break;
        if (start[i] < 0 || length[i] < 0 || start[i] > whole[i] || length[i] > whole[i] - start[i]) break;
        address[i] = values[low] + (at[0] + (uint64_t)start[i]) * (uint64_t)itemsize;
        more[i] = start[i] + length[i] < whole[i];
        bad = -1;
    }
    Py_END_ALLOW_THREADS
    release(&held);
    return PyLong_FromSsize_t(bad);
fail:
    release(&held);
    return NULL;
}

/* copy(address, bytes, out): the bytes at those addresses, end to end. */
PyObject *copy(PyObject *self, PyObject *args) {
    PyObject *o[3];
    if (!PyArg_ParseTuple(args, "OOO", &o[0], &o[1], &o[2])) return NULL;
    Held held = {.count = 0};
    Py_ssize_t n, n2, room;
    const uint64_t *address;
    const int64_t *bytes;
    char *out;
    TAKE(address, o[0], 8, 0, &n)
    TAKE(bytes, o[1], 8, 0, &n2)
    TAKE(out, o[2], 1, 1, &room)
    NEED(n == n2, "arrays differ in length")
    int64_t total = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        NEED(bytes[i] >= 0 && bytes[i] <= room - total, "out: too small")
        total += bytes[i];
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < n; out += bytes[i], i++)
        memcpy(out, (const void *)(uintptr_t)address[i], (size_t)bytes[i]);
    Py_END_ALLOW_THREADS
    release(&held);
    Py_RETURN_NONE;
fail:
    release(&held);
    return NULL;
}

/* search(element, part, first_record, offsets, out): for each element of a part, the number within the part
   of the last document that begins at or before it. -> -1, or the first that could not be looked up. */
PyObject *search(PyObject *self, PyObject *args) {
    PyObject *o[5];
    if (!PyArg_ParseTuple(args, "OOOOO", &o[0], &o[1], &o[2], &o[3], &o[4])) return NULL;
    Held held = {.count = 0};
    Py_ssize_t n, n2, parts, p2, n3;
    const int64_t *element, *part, *first_record;
    const uint64_t *offsets;
    int64_t *document;
    TAKE(element, o[0], 8, 0, &n)
    TAKE(part, o[1], 8, 0, &n2)
    TAKE(first_record, o[2], 8, 0, &parts)
    TAKE(offsets, o[3], 8, 0, &p2)
    TAKE(document, o[4], 8, 1, &n3)
    NEED(n == n2 && n == n3 && p2 + 1 == parts, "arrays differ in length")
    Py_ssize_t bad = -1;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t p = part[i];
        if (p < 0 || p >= p2 || !offsets[p] || first_record[p + 1] <= first_record[p]) {
            bad = i;
            break;
        }
        const u64 *bounds = (const u64 *)(uintptr_t)offsets[p];
        int64_t low = 0, high = first_record[p + 1] - first_record[p];
        while (high - low > 1) { /* bounds[low] <= element < bounds[high] */
            int64_t middle = low + (high - low) / 2;
            if (bounds[middle] <= (uint64_t)element[i]) low = middle;
            else high = middle;
        }
        document[i] = low;
    }
    Py_END_ALLOW_THREADS
    release(&held);
    return PyLong_FromSsize_t(bad);
fail:
    release(&held);
    return NULL;
}

/* look_up(tables, which, index, out): out[i] = tables[which[i]][index[i]]. -> -1, or the first that is in no table. */
PyObject *look_up(PyObject *self, PyObject *args) {
    PyObject *objects, *o[3];
    if (!PyArg_ParseTuple(args, "OOOO", &objects, &o[0], &o[1], &o[2])) return NULL;
    Held held = {.count = 0};
    Tables tables;
    Py_ssize_t n, n2, n3;
    const int64_t *which, *index;
    int64_t *out;
    if (!take_tables(&tables, objects)) goto fail;
    TAKE(which, o[0], 8, 0, &n)
    TAKE(index, o[1], 8, 0, &n2)
    TAKE(out, o[2], 8, 1, &n3)
    NEED(n == n2 && n == n3, "arrays differ in length")
    Py_ssize_t bad = -1;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < n; i++) {
        if (which[i] < 0 || which[i] >= tables.count || index[i] < 0 || index[i] >= tables.items[which[i]]) {
            bad = i;
            break;
        }
        out[i] = tables.table[which[i]][index[i]];
    }
    Py_END_ALLOW_THREADS
    release_tables(&tables);
    release(&held);
    return PyLong_FromSsize_t(bad);
fail:
    release_tables(&tables);
    release(&held);
    return NULL;
}
