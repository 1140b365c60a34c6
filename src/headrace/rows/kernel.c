/* The inner loops of loading, without the interpreter: find documents, and copy them into rows.

   NumPy alone needs about a microsecond a document, which short documents feel; see docs/log.md for the
   figures. reference.py holds the same functions in NumPy, and a test compares the two.

   Addresses come from arrays that the caller keeps alive, and `copy` and `fill` trust them; `locate` and `bounds`
   make them, and check every index and length against the tables that come with it. Outputs are never written
   beyond their size. */

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

static void release(Held *held) {
    while (held->count) PyBuffer_Release(&held->views[--held->count]);
}

/* A flat buffer of `itemsize` bytes an item (0: any). None gives NULL, which only outputs may be. */
static void *take(Held *held, PyObject *object, Py_ssize_t itemsize, int writable, Py_ssize_t *items,
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

/* bounds(record, part, first_record, offsets, elements, begin, end): where each record's elements lie within
   its part. -> -1, or the number of the first record whose offsets are damaged. */
static PyObject *bounds(PyObject *self, PyObject *args) {
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
static PyObject *locate(PyObject *self, PyObject *args) {
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
        int64_t low = last_at_most(first_record, parts, record[i]);
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
static PyObject *copy(PyObject *self, PyObject *args) {
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
static PyObject *search(PyObject *self, PyObject *args) {
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

/* order/permutation.py, number by number: see there for what it does and why. */
#define GOLDEN 0x9E3779B97F4A7C15ULL
#define ROUNDS 8
#define SMALL 32

static inline uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
    return value ^ (value >> 31);
}

static int64_t by_hash(uint64_t number, uint64_t size, uint64_t key) {
    uint64_t own = mix(key + number * GOLDEN);
    int64_t before = 0;
    for (uint64_t i = 0; i < size; i++) {
        uint64_t other = mix(key + i * GOLDEN);
        before += other < own || (other == own && i < number);
    }
    return before;
}

static inline uint64_t network(uint64_t number, uint64_t size, uint64_t key) {
    int bits = 64 - __builtin_clzll(size - 1), low_bits = bits / 2;
    uint64_t low_mask = (1ULL << low_bits) - 1, high_mask = (1ULL << (bits - low_bits)) - 1;
    uint64_t high = number >> low_bits, low = number & low_mask;
    for (int turn = 0; turn < ROUNDS; turn += 2) {
        high ^= mix((key + (uint64_t)turn * GOLDEN) ^ low) & high_mask;
        low ^= mix((key + (uint64_t)(turn + 1) * GOLDEN) ^ high) & low_mask;
    }
    return high << low_bits | low;
}

/* permute(position, size, key, out) -> -1, or the first position that lies outside its permutation. */
static PyObject *permute(PyObject *self, PyObject *args) {
    PyObject *o[4];
    if (!PyArg_ParseTuple(args, "OOOO", &o[0], &o[1], &o[2], &o[3])) return NULL;
    Held held = {.count = 0};
    Py_ssize_t n, n2, n3, n4;
    const int64_t *position, *size;
    const uint64_t *key;
    int64_t *out;
    TAKE(position, o[0], 8, 0, &n)
    TAKE(size, o[1], 8, 0, &n2)
    TAKE(key, o[2], 8, 0, &n3)
    TAKE(out, o[3], 8, 1, &n4)
    /* One size or key may serve all. */
    NEED((n == n2 || n2 == 1) && (n == n3 || n3 == 1) && n == n4, "arrays differ in length")
    Py_ssize_t bad = -1;
    Py_BEGIN_ALLOW_THREADS
    /* First every number once: without a branch, the processor works on several at a time. */
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t count = size[n2 == 1 ? 0 : i];
        if (position[i] < 0 || position[i] >= count) {
            bad = i;
            break;
        }
        uint64_t large = (uint64_t)(count > SMALL ? count : SMALL + 1);
        out[i] = (int64_t)network((uint64_t)position[i], large, mix(key[n3 == 1 ? 0 : i] + GOLDEN));
    }
    for (Py_ssize_t i = 0; i < n && bad < 0; i++) {
        uint64_t count = (uint64_t)size[n2 == 1 ? 0 : i];
        if (count > SMALL && (uint64_t)out[i] < count) continue;
        uint64_t mixed = mix(key[n3 == 1 ? 0 : i] + GOLDEN);
        if (count <= SMALL) out[i] = by_hash((uint64_t)position[i], count, mixed);
        else
            while ((uint64_t)out[i] >= count) out[i] = (int64_t)network((uint64_t)out[i], count, mixed);
    }
    Py_END_ALLOW_THREADS
    release(&held);
    return PyLong_FromSsize_t(bad);
fail:
    release(&held);
    return NULL;
}

/* pack(rows, keys, seq_len, tables, row, length_index, nth, start, length): pack/documents.py for many rows: which
   pieces of documents each holds. `tables` are those of PackedDocuments.tables. -> how many pieces there are; they are
   written if there is room for all: if there is not, ask again with as much as it takes. */
enum { FULL_START, FULL_INDEX, FULL_PER, REST_AT, LEAF_START, LEAF_NODE, LEAF_FIRST, PARENT, FIRST, LENGTH, PER_ROW,
       OFFSET, PLACE_OF, COUNTS, REST_START, FIRST_RUN, RUN_START, RUN_INDEX, TABLES };
#define DEEPEST 4096

static PyObject *pack(PyObject *self, PyObject *args) {
    PyObject *o[7], *tables;
    long long seq_len;
    if (!PyArg_ParseTuple(args, "OOLOOOOOO", &o[0], &o[1], &seq_len, &tables, &o[2], &o[3], &o[4], &o[5], &o[6]))
        return NULL;
    if (!PyTuple_Check(tables) || PyTuple_Size(tables) != TABLES) {
        PyErr_SetString(PyExc_ValueError, "tables: wrong number");
        return NULL;
    }
    Held held = {.count = 0};
    Py_ssize_t n, n2 = 0, room, r2, r3, r4, r5, size[TABLES];
    const int64_t *rows, *t[TABLES];
    const uint64_t *keys = NULL;
    int64_t *row, *length_index, *nth, *start, *length;
    for (int i = 0; i < TABLES; i++) {
        t[i] = take(&held, PyTuple_GetItem(tables, i), 8, 0, &size[i], "tables");
        if (PyErr_Occurred()) goto fail;
    }
    TAKE(rows, o[0], 8, 0, &n)
    if (o[1] != Py_None) {
        TAKE(keys, o[1], 8, 0, &n2)
        NEED(n == n2, "arrays differ in length")
    }
    TAKE(row, o[2], 8, 1, &room)
    TAKE(length_index, o[3], 8, 1, &r2)
    TAKE(nth, o[4], 8, 1, &r3)
    TAKE(start, o[5], 8, 1, &r4)
    TAKE(length, o[6], 8, 1, &r5)
    NEED(room == r2 && room == r3 && room == r4 && room == r5, "arrays of pieces differ in length")
    NEED(size[FULL_START] == size[FULL_INDEX] + 1 && size[FULL_PER] == size[REST_AT], "tables: of full rows")
    NEED(size[LEAF_START] == size[LEAF_NODE] + 1 && size[LEAF_NODE] == size[LEAF_FIRST], "tables: of leaves")
    NEED(size[PARENT] == size[FIRST] && size[PARENT] == size[LENGTH] && size[PARENT] == size[PER_ROW] &&
         size[PARENT] == size[OFFSET], "tables: of moves")
    NEED(size[COUNTS] == size[REST_START] && size[COUNTS] == size[FIRST_RUN] &&
         size[RUN_START] == size[RUN_INDEX] + 1, "tables: of classes")
    int64_t full_rows = size[FULL_START] ? t[FULL_START][size[FULL_START] - 1] : 0, nodes = size[PARENT];
    int64_t packed_rows = size[LEAF_START] ? t[LEAF_START][size[LEAF_START] - 1] : 0, total = 0, bad = -1;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < n && bad < 0; i++) {
        if (rows[i] < 0 || rows[i] >= full_rows + packed_rows) {
            bad = i;
            break;
        }
        if (rows[i] < full_rows) {
            if (total < room) {
                int64_t run = last_at_most(t[FULL_START], size[FULL_START] - 1, rows[i]), index = t[FULL_INDEX][run];
                if (index < 0 || index >= size[FULL_PER] || t[FULL_PER][index] < 1) {
                    bad = i;
                    break;
                }
                int64_t number = rows[i] - t[FULL_START][run], per = t[FULL_PER][index];
                row[total] = i, length_index[total] = index, nth[total] = number / per;
                start[total] = number % per * seq_len, length[total] = seq_len;
            }
            total++;
            continue;
        }
        /* From the leaf up to the root, then its pieces from the root down: the longest first. */
        int64_t number = rows[i] - full_rows, leaf = last_at_most(t[LEAF_START], size[LEAF_START] - 1, number);
        int64_t path[DEEPEST], place[DEEPEST], depth = 0;
        int64_t node = t[LEAF_NODE][leaf], at = t[LEAF_FIRST][leaf] + number - t[LEAF_START][leaf];
        while (node >= 0 && node < nodes && depth < DEEPEST) {
            path[depth] = node, place[depth++] = at;
            at += t[FIRST][node];
            node = t[PARENT][node];
        }
        if (node != -1) {
            bad = i;
            break;
        }
        while (depth-- > 0) {
            int64_t move = path[depth], count = t[PER_ROW][move], of = t[LENGTH][move];
            int64_t class = of > 0 && of < size[PLACE_OF] ? t[PLACE_OF][of] : -1;
            int64_t position = t[OFFSET][move] + place[depth] * count;
            if (class < 0 || class >= size[COUNTS] || position < 0 || position + count > t[COUNTS][class]) {
                bad = i;
                break;
            }
            uint64_t among = (uint64_t)t[COUNTS][class], large = among > SMALL ? among : SMALL + 1;
            uint64_t key = keys ? mix(mix(mix(keys[i] + GOLDEN) + (uint64_t)of) + GOLDEN) : 0;
            for (int64_t k = 0; k < count; k++, total++, position++) {
                if (total >= room) continue;
                row[total] = i, length[total] = of, start[total] = position;
                /* Once for now, without a branch, as in permute. */
                nth[total] = keys ? (int64_t)network((uint64_t)position, large, key) : position;
            }
        }
    }
    for (int64_t i = 0; i < total && total <= room && bad < 0; i++) {
        if (rows[row[i]] < full_rows) continue;
        int64_t class = t[PLACE_OF][length[i]], j = nth[i];
        uint64_t among = (uint64_t)t[COUNTS][class];
        if (keys && ((uint64_t)j >= among || among <= SMALL)) {
            uint64_t key = mix(mix(mix(keys[row[i]] + GOLDEN) + (uint64_t)length[i]) + GOLDEN);
            if (among <= SMALL) j = by_hash((uint64_t)start[i], among, key);
            while ((uint64_t)j >= among) j = (int64_t)network((uint64_t)j, among, key);
        }
        int64_t run = t[FIRST_RUN][class];
        j += t[REST_START][class];
        if (run < 0 || run >= size[RUN_INDEX] || t[RUN_INDEX][run] < 0 || t[RUN_INDEX][run] >= size[REST_AT]) {
            bad = i;
            break;
        }
        if (j >= t[RUN_START][run + 1]) run = last_at_most(t[RUN_START], size[RUN_START] - 1, j);
        length_index[i] = t[RUN_INDEX][run], nth[i] = j - t[RUN_START][run], start[i] = t[REST_AT][t[RUN_INDEX][run]];
    }
    Py_END_ALLOW_THREADS
    NEED(bad < 0, "no such row, or a damaged plan")
    release(&held);
    return PyLong_FromLongLong(total);
fail:
    release(&held);
    return NULL;
}

/* Copy `length` tokens, and `labelled` labels that begin one token later (or at the same one). */
#define COPY(source, target)                                                                                 \
    WIDE static void copy_##source##_##target(const void *from, void *to, int64_t length) {                  \
        const source *s = from;                                                                              \
        target *t = to;                                                                                      \
        for (int64_t i = 0; i < length; i++) t[i] = (target)s[i];                                            \
    }
#define COPIES(source) COPY(source, i32) COPY(source, i64)
COPIES(u8) COPIES(u16) COPIES(u32) COPIES(u64) COPIES(i8) COPIES(i16) COPIES(i32) COPIES(i64)

typedef void (*Copy)(const void *, void *, int64_t);

/* By the code of the stored type, in the order of TYPES in reference.py. */
static const struct { int itemsize; Copy to32, to64; } TYPES[] = {
    {1, copy_u8_i32, copy_u8_i64},   {2, copy_u16_i32, copy_u16_i64}, {4, copy_u32_i32, copy_u32_i64},
    {8, copy_u64_i32, copy_u64_i64}, {1, copy_i8_i32, copy_i8_i64},   {2, copy_i16_i32, copy_i16_i64},
    {4, copy_i32_i32, copy_i32_i64}, {8, copy_i64_i32, copy_i64_i64},
};
#define TYPE_COUNT (sizeof TYPES / sizeof TYPES[0])

/* Stored types that hold more than an int32 does. */
#define FITS(source)                                                                                         \
    WIDE static int fits_##source(const void *from, int64_t length) {                                        \
        const source *s = from;                                                                              \
        int over = 0;                                                                                        \
        for (int64_t i = 0; i < length; i++) over |= (source)(int32_t)s[i] != s[i] || (int32_t)s[i] < LOWEST; \
        return !over;                                                                                        \
    }
#define LOWEST 0
FITS(u32) FITS(u64)
#undef LOWEST
#define LOWEST INT32_MIN
FITS(i64)

static int fits(int type, const void *from, int64_t length) {
    return type == 2 ? fits_u32(from, length) : type == 3 ? fits_u64(from, length)
         : type == 7 ? fits_i64(from, length) : 1;
}

#define SET(type)                                                                                            \
    WIDE static void set_##type(void *to, int64_t value, int64_t length) {                                   \
        type *t = to;                                                                                        \
        for (int64_t i = 0; i < length; i++) t[i] = (type)value;                                             \
    }                                                                                                        \
    WIDE static void count_##type(void *to, int64_t length) {                                                \
        type *t = to;                                                                                        \
        for (int64_t i = 0; i < length; i++) t[i] = (type)i;                                                 \
    }
SET(i32) SET(i64)

static void set(void *to, Py_ssize_t itemsize, int64_t at, int64_t value, int64_t length) {
    if (itemsize == 4) set_i32((int32_t *)to + at, value, length);
    else set_i64((int64_t *)to + at, value, length);
}

#define AHEAD 8
#define LINES 4

typedef struct {
    int64_t seq_len, pad, ignore;
    int shifted;
    Py_ssize_t size;    /* bytes of a token and of a label */
    Py_ssize_t meta;    /* bytes of a position id */
    char *tokens, *labels, *positions;
    int32_t *segments, *bounds;
    uint8_t *loss;
    int64_t bounds_count, longest;
    int too_large;      /* a token does not fit */
} Rows;

static void put_bound(Rows *r, int64_t end, int64_t length) {
    if (r->bounds) r->bounds[r->bounds_count++] = (int32_t)end;
    if (length > r->longest) r->longest = length;
}

static void put_piece(Rows *r, int64_t at, const char *from, int type, int64_t length, int more, int32_t segment) {
    Copy copy = r->size == 4 ? TYPES[type].to32 : TYPES[type].to64;
    if (r->size == 4 && !fits(type, from, length + (more && r->shifted))) r->too_large = 1;
    if (r->tokens) copy(from, r->tokens + at * r->size, length);
    int64_t first = r->shifted ? 0 : 1, known = r->shifted ? length - !more : length;
    if (r->labels) {
        copy(from + TYPES[type].itemsize, r->labels + (at + first) * r->size, known - first);
        if (!r->shifted) set(r->labels, r->size, at, r->ignore, 1);
        else if (!more) set(r->labels, r->size, at + length - 1, r->ignore, 1);
    }
    if (r->loss) {
        memset(r->loss + at, 1, (size_t)length);
        if (!r->shifted) r->loss[at] = 0;
        else if (!more) r->loss[at + length - 1] = 0;
    }
    if (r->positions) {
        if (r->meta == 4) count_i32((int32_t *)r->positions + at, length);
        else count_i64((int64_t *)r->positions + at, length);
    }
    if (r->segments) set_i32(r->segments + at, segment, length);
    put_bound(r, at + length, length);
}

static void put_padding(Rows *r, int64_t at, int64_t length) {
    if (!length) return;
    if (r->tokens) set(r->tokens, r->size, at, r->pad, length);
    if (r->labels) set(r->labels, r->size, at, r->ignore, length);
    if (r->loss) memset(r->loss + at, 0, (size_t)length);
    if (r->positions) {
        if (r->meta == 4) count_i32((int32_t *)r->positions + at, length);
        else count_i64((int64_t *)r->positions + at, length);
    }
    if (r->segments) set_i32(r->segments + at, 0, length);
    put_bound(r, at + length, length);
}

/* fill(rows, seq_len, first, begin, end, row, length, address, type, more, shifted, pad, ignore,
        tokens, labels, position_ids, segment_ids, loss_mask, bounds) -> (bounds written, longest stretch)
   Pieces `begin` to `end`; their rows are counted from `first` on. */
static PyObject *fill(PyObject *self, PyObject *args) {
    PyObject *o[11];
    Py_ssize_t rows, begin, end;
    Rows r;
    memset(&r, 0, sizeof r);
    long long seq_len, first, pad, ignore;
    if (!PyArg_ParseTuple(args, "nLLnnOOOOOpLLOOOOOO", &rows, &seq_len, &first, &begin, &end, &o[0], &o[1], &o[2],
                          &o[3], &o[4], &r.shifted, &pad, &ignore, &o[5], &o[6], &o[7], &o[8], &o[9], &o[10]))
        return NULL;
    Held held = {.count = 0};
    Py_ssize_t n, n2, n3, n4, n5, count;
    const int64_t *row, *length;
    const uint64_t *address;
    const uint8_t *type, *more;
    r.seq_len = seq_len, r.pad = pad, r.ignore = ignore;
    NEED(rows >= 0 && seq_len > 0 && rows <= PY_SSIZE_T_MAX / seq_len, "rows and seq_len must be positive")
    int64_t places = rows * seq_len;
    TAKE(row, o[0], 8, 0, &n)
    TAKE(length, o[1], 8, 0, &n2)
    TAKE(address, o[2], 8, 0, &n3)
    TAKE(type, o[3], 1, 0, &n4)
    TAKE(more, o[4], 1, 0, &n5)
    NEED(n == n2 && n == n3 && n == n4 && n == n5, "arrays of pieces differ in length")
    NEED(0 <= begin && begin <= end && end <= n, "no such pieces")
    TAKE(r.tokens, o[5], 0, 1, &count)
    if (r.tokens) {
        r.size = held.views[held.count - 1].itemsize;
        NEED(count == places, "tokens: wrong size")
    }
    TAKE(r.labels, o[6], 0, 1, &count)
    if (r.labels) {
        Py_ssize_t size = held.views[held.count - 1].itemsize;
        NEED(count == places && (!r.size || r.size == size), "labels: wrong size")
        r.size = size;
    }
    TAKE(r.positions, o[7], 0, 1, &count)
    if (r.positions) {
        r.meta = held.views[held.count - 1].itemsize;
        NEED(count == places && (r.meta == 4 || r.meta == 8), "position_ids: wrong size")
    }
    TAKE(r.segments, o[8], 4, 1, &count)
    NEED(!r.segments || count == places, "segment_ids: wrong size")
    TAKE(r.loss, o[9], 1, 1, &count)
    NEED(!r.loss || count == places, "loss_mask: wrong size")
    TAKE(r.bounds, o[10], 4, 1, &count)
    NEED(!r.bounds || (count >= end - begin + rows + 1 && places <= INT32_MAX), "bounds: too small")
    NEED(!r.size || r.size == 4 || r.size == 8, "tokens and labels are int32 or int64")

    int64_t at = 0; /* row 0's first place; rows follow each other in the buffer */
    int32_t segment = 0;
    int64_t current = 0;
    Py_ssize_t bad = -1;
    Py_BEGIN_ALLOW_THREADS
    if (r.bounds) r.bounds[r.bounds_count++] = 0;
    for (Py_ssize_t i = begin; i < end && bad < 0; i++) {
        /* Short documents lie far apart: fetch them from memory while the ones before are being copied. */
        if (i + AHEAD < end) {
            const char *soon = (const char *)(uintptr_t)address[i + AHEAD];
            for (int line = 0; line < LINES; line++) __builtin_prefetch(soon + 64 * line);
        }
        int64_t to = row[i] - first;
        if (to < current || to >= rows || length[i] < 1 || type[i] >= TYPE_COUNT) bad = i;
        while (bad < 0 && current < to) {
            put_padding(&r, at, (current + 1) * r.seq_len - at);
            at = ++current * r.seq_len;
            segment = 0;
        }
        if (bad < 0 && length[i] > (current + 1) * r.seq_len - at) bad = i;
        if (bad < 0) {
            put_piece(&r, at, (const char *)(uintptr_t)address[i], type[i], length[i], more[i], ++segment);
            at += length[i];
        }
    }
    while (bad < 0 && current < rows) {
        put_padding(&r, at, (current + 1) * r.seq_len - at);
        at = ++current * r.seq_len;
    }
    Py_END_ALLOW_THREADS
    NEED(bad < 0, "pieces out of order, empty, or longer than their row")
    if (r.too_large) {
        PyErr_SetString(PyExc_OverflowError, "a token does not fit into int32");
        goto fail;
    }
    release(&held);
    return Py_BuildValue("LL", (long long)r.bounds_count, (long long)r.longest);
fail:
    release(&held);
    return NULL;
}

static PyMethodDef methods[] = {
    {"bounds", bounds, METH_VARARGS, NULL},
    {"copy", copy, METH_VARARGS, NULL},
    {"locate", locate, METH_VARARGS, NULL},
    {"pack", pack, METH_VARARGS, NULL},
    {"permute", permute, METH_VARARGS, NULL},
    {"search", search, METH_VARARGS, NULL},
    {"fill", fill, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernel", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModule_Create(&module); }
