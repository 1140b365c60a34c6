/* Rows of tokens, labels and positions, filled piece by piece. */

#include "kernel.h"

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
PyObject *fill(PyObject *self, PyObject *args) {
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
